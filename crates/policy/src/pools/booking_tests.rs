use proptest::prelude::*;

use super::*;

fn mib(n: u64) -> Pages {
    Pages::from_mib(n)
}

fn pool(id: u32, parent: Option<u32>, min: u64, max: Option<u64>, expandable: bool) -> Pool {
    Pool {
        id: PoolId(id),
        name: ["prod", "prod/db", "prod/db/hot", "test"][id as usize].to_owned(),
        parent: parent.map(PoolId),
        shares: 1_000,
        min: mib(min),
        max: max.map(mib),
        expandable,
        tax: None,
    }
}

fn books<'a>(pools: &'a [Pool], capacity: u64, promises: &[(Option<u32>, u64)]) -> Books<'a> {
    let promises = promises.iter().map(|&(pool, n)| (pool.map(PoolId), mib(n))).collect();
    Books { pools, capacity: mib(capacity), promises }
}

#[test]
fn a_vm_takes_from_its_pool_and_a_pool_reserves_what_it_does_not_use() {
    let pools = [pool(0, None, 600, None, false)];
    let b = books(&pools, 1_000, &[(Some(0), 200)]);
    assert_eq!(b.admit(Some(PoolId(0)), mib(400)), Ok(()));
    let refusal = b.admit(Some(PoolId(0)), mib(401)).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "needs 401 MiB unreserved, pool prod has 400 MiB left of its min of 600 MiB (it is not \
         expandable)"
    );
    // Beside the pool there are 400, although it uses only 200 of its own.
    assert_eq!(b.admit(None, mib(400)), Ok(()));
    let refusal = b.admit(None, mib(500)).unwrap_err();
    assert_eq!(refusal.to_string(), "needs 500 MiB unreserved, 400 MiB free of promises");
    // A pool that nobody knows is no pool.
    assert_eq!(b.admit(Some(PoolId(77)), mib(400)), Ok(()));
}

#[test]
fn an_expandable_pool_borrows_from_its_parent_and_on_from_the_host() {
    let pools = [pool(0, None, 600, Some(900), true), pool(1, Some(0), 100, None, true)];
    let b = books(&pools, 1_000, &[(Some(1), 100), (Some(0), 300)]);
    // 400 of prod's 600 are taken, and it may have 900; the inner one has what its parent has.
    assert_eq!(b.promised()[0].used, mib(400));
    let left: Vec<_> = b.promised().iter().map(Promised::left).collect();
    assert_eq!(left, [Some(mib(500)), None, Some(mib(400))]);
    assert_eq!(b.admit(Some(PoolId(1)), mib(500)), Ok(()));
    let refusal = b.admit(Some(PoolId(1)), mib(501)).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "needs 501 MiB unreserved, pool prod has 500 MiB left of its max of 900 MiB"
    );
    // The host has 400 beside prod's 600, of which 250 are gone.
    let b = books(&pools, 1_000, &[(Some(1), 100), (Some(0), 300), (None, 250)]);
    let refusal = b.admit(Some(PoolId(1)), mib(400)).unwrap_err();
    assert_eq!(refusal.to_string(), "needs 200 MiB unreserved, 150 MiB free of promises");
}

#[test]
fn a_pool_that_is_not_expandable_promises_its_min_or_its_max_if_that_is_less() {
    let lack = |max| {
        let pools = [pool(0, None, 600, Some(max), false)];
        let refusal = books(&pools, 1_000, &[]).admit(Some(PoolId(0)), mib(601)).unwrap_err();
        (refusal.left, refusal.of, refusal.lack)
    };
    assert_eq!(lack(599), (mib(599), mib(599), Lack::Max));
    assert_eq!(lack(600), (mib(600), mib(600), Lack::Min));
    assert_eq!(lack(900), (mib(600), mib(600), Lack::Min));
}

#[test]
fn what_was_too_much_before_does_not_refuse_what_is_elsewhere() {
    let pools = [pool(0, None, 100, None, false), pool(3, None, 300, None, false)];
    let b = books(&pools, 1_000, &[(Some(0), 150)]);
    assert_eq!(b.admit(Some(PoolId(3)), mib(200)), Ok(()));
    assert!(b.admit(Some(PoolId(0)), mib(1)).is_err());
    let less = [pool(0, None, 120, None, false), pool(3, None, 300, None, false)];
    assert_eq!(books(&less, 1_000, &[(Some(0), 150)]).no_worse_than(&b), Ok(()));
    let worse = [pool(0, None, 90, None, false), pool(3, None, 300, None, false)];
    assert!(books(&worse, 1_000, &[(Some(0), 150)]).no_worse_than(&b).is_err());
}

/// Nothing is asked for in addition: what may be promised has become less.
#[test]
fn who_may_promise_less_than_is_promised_is_told_both() {
    let before = [pool(0, None, 600, Some(900), true)];
    let b = books(&before, 1_000, &[(Some(0), 500)]);
    let refused = |pools: &[Pool], capacity| {
        let after = books(pools, capacity, &[(Some(0), 500)]);
        after.no_worse_than(&b).unwrap_err().to_string()
    };
    assert_eq!(refused(&before, 400), "600 MiB is promised, 400 MiB can be");
    let lower_max = [pool(0, None, 300, Some(400), true)];
    assert_eq!(
        refused(&lower_max, 1_000),
        "pool prod has promised 500 MiB, and its max is 400 MiB"
    );
    let fixed = [pool(0, None, 300, Some(900), false)];
    assert_eq!(
        refused(&fixed, 1_000),
        "pool prod has promised 500 MiB, and its min is 300 MiB (it is not expandable)"
    );
    // A page less: the unit that tells them apart.
    let after = Books { capacity: mib(600) - Pages(1), ..books(&before, 0, &[(Some(0), 500)]) };
    let why = after.no_worse_than(&b).unwrap_err().to_string();
    assert_eq!(why, "153600 pages is promised, 153599 pages can be");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// However VMs and pools come and go: what was promised can be kept. All of it fits the host, a
    /// pool that may not borrow stays within its min, and no pool exceeds its max.
    #[test]
    fn promises_can_be_kept(
        bounds in proptest::collection::vec((0u64..330, 0u64..400, any::<[bool; 2]>()), 4),
        events in proptest::collection::vec((0u32..5, 0u64..300, any::<bool>()), 0..40),
    ) {
        let parents = [None, Some(0), Some(1), None];
        let pools: Vec<Pool> = bounds
            .iter()
            .enumerate()
            .map(|(i, &(min, more, [expandable, limited]))| {
                pool(i as u32, parents[i], min, limited.then_some(min + more), expandable)
            })
            .collect();
        let empty = books(&[], 1_000, &[]);
        let mut b = books(&pools, 1_000, &[]);
        if b.no_worse_than(&empty).is_err() {
            return Ok(()); // Refused as a whole, which is another test.
        }
        for (at, pages, leave) in events {
            if leave {
                b.promises.pop();
                continue;
            }
            let at = (at < 4).then_some(PoolId(at));
            if b.admit(at, mib(pages)).is_ok() {
                b.promises.push((at, mib(pages)));
            }
            // Slowly: by the definition, from each pool down.
            let sum_in = |top: Option<u32>| -> Pages {
                let inside = |p: &Option<PoolId>| match top {
                    None => true,
                    Some(top) => ancestors(&pools, *p).any(|i| i as u32 == top),
                };
                b.promises.iter().filter(|(p, _)| inside(p)).map(|&(_, n)| n).sum()
            };
            prop_assert!(sum_in(None) <= mib(1_000));
            for (i, pool) in pools.iter().enumerate() {
                let used = sum_in(Some(i as u32));
                prop_assert!(pool.max.is_none_or(|max| used <= max));
                prop_assert!(pool.expandable || used <= pool.min, "{used} of {pool:?}");
            }
            let reserved: Pages = pools
                .iter()
                .enumerate()
                .filter(|(_, p)| p.parent.is_none())
                .map(|(i, p)| p.min.max(sum_in(Some(i as u32))))
                .sum();
            let direct: Pages =
                b.promises.iter().filter(|(p, _)| p.is_none()).map(|&(_, n)| n).sum();
            prop_assert!(reserved + direct <= mib(1_000), "the mins of pools are kept for them");
        }
    }
}
