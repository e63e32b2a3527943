//! The pin word, the flight of a load and the queue of copies to a device, as they are shipped, in every order of their
//! steps.

#[path = "../../rust/kvtier-core/src/flight.rs"]
pub mod flight;
#[path = "../../rust/kvtier-core/src/pin.rs"]
pub mod pin;
#[path = "../../rust/kvtier-core/src/transfers.rs"]
pub mod transfers;

/// What the core calls `sync`, of loom.
pub mod sync {
    use std::time::Instant;

    pub use loom::sync::atomic;

    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);
    pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);
    #[derive(Debug)]
    pub struct Condvar(loom::sync::Condvar);
    pub struct TimedOut(bool);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }
        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }
    }

    impl<T> std::ops::Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> std::ops::DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    impl TimedOut {
        pub fn timed_out(self) -> bool {
            self.0
        }
    }

    impl Condvar {
        #[expect(clippy::new_without_default, reason = "as in the core")]
        pub fn new() -> Self {
            Condvar(loom::sync::Condvar::new())
        }
        /// There is no time in loom: a deadline of long ago is over, and another one never comes.
        pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> TimedOut {
            if deadline <= *super::LONG_AGO {
                return TimedOut(true);
            }
            guard.0 = Some(self.0.wait(guard.0.take().unwrap()).unwrap());
            TimedOut(false)
        }
        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = Some(self.0.wait(guard.0.take().unwrap()).unwrap());
        }
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

/// A deadline that is over.
pub static LONG_AGO: std::sync::LazyLock<std::time::Instant> =
    std::sync::LazyLock::new(std::time::Instant::now);

/// Runs it in all orders of steps with up to three preemptions, which is where races show.
pub fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}
