//! A message that makes an actor panic, for the tests that show it being replaced.
//! Only compiled with the feature `fault-injection`, which no release build turns on.

/// Panics in the actor that handles it.
#[cfg(feature = "fault-injection")]
#[derive(Debug, Clone, Copy, actix::Message)]
#[rtype(result = "()")]
pub struct Panic;

/// Lets an actor type handle [`Panic`].
macro_rules! panics_on_request {
    ($actor:ty) => {
        #[cfg(feature = "fault-injection")]
        impl actix::Handler<crate::support::fault::Panic> for $actor {
            type Result = ();
            fn handle(&mut self, _: crate::support::fault::Panic, _: &mut Self::Context) {
                panic!("a test asked for this panic");
            }
        }
    };
}
pub(crate) use panics_on_request;
