//! How the manager says no.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of error an answer carries; each has one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400: the request itself is wrong; the message names the field.
    BadRequest,
    /// 404: no such VM, pool, path, or method on that path; nothing in the journal of that time.
    NotFound,
    /// 409: right request, wrong moment (a name that is taken, a VM that is stopping).
    Conflict,
    /// 507: admission control refused; the message carries the numbers.
    NoRoom,
    /// 500: the manager or the VMM failed.
    Internal,
}

impl ErrorCode {
    /// The HTTP status that it is sent with.
    pub const fn status(self) -> u16 {
        match self {
            ErrorCode::BadRequest => 400,
            ErrorCode::NotFound => 404,
            ErrorCode::Conflict => 409,
            ErrorCode::NoRoom => 507,
            ErrorCode::Internal => 500,
        }
    }
}

/// The body of every answer whose status is 400 or above.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What kind of error.
    pub code: ErrorCode,
    /// One line: what, and where.
    pub message: String,
}
