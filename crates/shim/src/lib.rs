//! Empty until its first part lands.
