//! Looks at files that a request names, such as kernels. Where a file system hangs, the request is answered all the same, and
//! no more than so many threads wait there: the others serve whoever names files that answer.

use std::time::Duration;

use ballast_api::ErrorCode;
use tokio::sync::Semaphore;

use crate::manager::Failure;

/// Looks under way at a time, of the 512 threads that the runtime has for what blocks.
static ROOM: Semaphore = Semaphore::const_new(64);
/// A disk that was asleep has answered by then.
const PATIENCE: Duration = Duration::from_secs(20);

/// What `what` finds, in a thread of its own. Who asks `patiently` waits without end.
///
/// # Errors
/// Internal: no answer in time; its thread stays until there is one. Conflict: too many stay so already.
pub async fn look<T: Send + 'static>(
    patiently: bool,
    what: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    if patiently {
        let look = tokio::task::spawn_blocking(what).await;
        return look.map_err(|e| Failure::internal(e.to_string()));
    }
    look_within(&ROOM, PATIENCE, what).await
}

async fn look_within<T: Send + 'static>(
    room: &'static Semaphore,
    patience: Duration,
    what: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let deadline = tokio::time::Instant::now() + patience;
    let Ok(Ok(place)) = tokio::time::timeout_at(deadline, room.acquire()).await else {
        let why = "too many requests wait for files of file systems that do not answer";
        return Err(Failure::new(ErrorCode::Conflict, why));
    };
    let look = tokio::task::spawn_blocking(move || {
        // Until it has come back, whoever asked.
        let _place = place;
        what()
    });
    match tokio::time::timeout_at(deadline, look).await {
        Ok(found) => found.map_err(|e| Failure::internal(e.to_string())),
        Err(_) => {
            let s = patience.as_secs_f64();
            Err(Failure::internal(format!("files that it names do not answer within {s} s")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn files_that_do_not_answer_hold_up_nobody_but_who_names_them() {
        static TWO: Semaphore = Semaphore::const_new(2);
        let hangs = async || {
            let (end, ended) = channel::<()>();
            let told = look_within(&TWO, Duration::from_millis(1), move || ended.recv()).await;
            (end, told.unwrap_err())
        };
        let (first, told) = hangs().await;
        assert!(told.message.contains("do not answer within"), "{told}");
        // One that answers is served beside it, and gives its place back.
        for _ in 0..3 {
            assert_eq!(look_within(&TWO, PATIENCE, || 7).await.unwrap(), 7);
        }
        let (second, _) = hangs().await;
        let refused = look_within(&TWO, Duration::from_millis(1), || 7).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict, "{refused}");
        drop((first, second));
        while TWO.available_permits() < 2 {
            tokio::task::yield_now().await;
        }
        assert_eq!(look_within(&TWO, PATIENCE, || 7).await.unwrap(), 7);
    }
}
