//! x
/// x
pub fn run(_: crate::settings::Settings) -> i32 {
    0
}
