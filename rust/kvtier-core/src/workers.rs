//! Threads that end when the store does, and pools of them.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::sync::channel::{Sender, unbounded};
use crate::sync::thread::{self, JoinHandle, ThreadId};
use crate::sync::{Condvar, Mutex};

/// Threads that are waited for with a deadline.
#[derive(Default)]
pub struct Crew {
    threads: Mutex<Vec<JoinHandle<()>>>,
    ids: Mutex<Vec<ThreadId>>,
    ended: Arc<(Mutex<usize>, Condvar)>,
}

/// Counts a thread's end, even by a panic.
struct End(Arc<(Mutex<usize>, Condvar)>);

impl Drop for End {
    fn drop(&mut self) {
        *self.0.0.lock() += 1;
        self.0.1.notify_all();
    }
}

impl Crew {
    /// Starts a thread.
    pub fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let end = End(self.ended.clone());
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let _end = end;
            run();
        })?;
        self.ids.lock().push(thread.thread().id());
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Waits until all have ended, the caller aside if he is one of them; false if they have not by
    /// `deadline`.
    pub fn join(&self, deadline: Instant) -> bool {
        let me = thread::current().id();
        let others = self.ids.lock().iter().filter(|&&id| id != me).count();
        let mut ended = self.ended.0.lock();
        while *ended < others {
            if self.ended.1.wait_until(&mut ended, deadline).timed_out() {
                return *ended >= others;
            }
        }
        drop(ended);
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads.into_iter().filter(|t| t.thread().id() != me) {
            let _ = thread.join(); // it has run to its end
        }
        true
    }

    /// In a fork, where the threads do not exist: lets them be.
    pub fn forget(&self) {
        std::mem::forget(std::mem::take(&mut *self.threads.lock()));
    }
}

/// A piece of work.
pub type Task = Box<dyn FnOnce() + Send>;

/// A fixed pool. Tasks must not wait for other tasks of the same pool.
pub struct Workers {
    queue: Mutex<Option<Sender<Task>>>,
    crew: Crew,
}

impl Workers {
    /// A pool of `count` threads with this name.
    pub fn new(name: &str, count: usize) -> io::Result<Self> {
        let (queue, tasks) = unbounded::<Task>();
        let crew = Crew::default();
        for _ in 0..count {
            let tasks = tasks.clone();
            crew.spawn(name, move || tasks.iter().for_each(|task| task()))?;
        }
        Ok(Workers {
            queue: Mutex::new(Some(queue)),
            crew,
        })
    }

    /// Has a thread of the pool run `task`; after [`Workers::stop`] the caller runs it.
    pub fn spawn(&self, task: Task) {
        let queue = self.queue.lock().clone();
        let refused = match queue {
            Some(queue) => queue.send(task).err().map(|e| e.0),
            None => Some(task),
        };
        if let Some(task) = refused {
            task();
        }
    }

    /// Finishes what was queued and ends the threads; false if they have not ended by `deadline`.
    pub fn stop(&self, deadline: Instant) -> bool {
        self.queue.lock().take();
        self.crew.join(deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn a_pool_finishes_its_queue_and_may_be_stopped_by_its_own_task() {
        let pool = Arc::new(Workers::new("test", 2).unwrap());
        let done = Arc::new(AtomicUsize::new(0));
        let far = Instant::now() + Duration::from_secs(60);
        for i in 0..100 {
            let (done, pool) = (done.clone(), pool.clone());
            pool.clone().spawn(Box::new(move || {
                done.fetch_add(1, Ordering::Relaxed);
                if i == 50 {
                    pool.stop(far);
                }
            }));
        }
        assert!(pool.stop(far));
        assert_eq!(done.load(Ordering::Relaxed), 100);
    }

    #[test]
    fn a_thread_that_hangs_is_left_at_the_deadline() {
        let crew = Crew::default();
        let (hold, held) = unbounded::<()>();
        crew.spawn("test", move || {
            let _ = held.recv();
        })
        .unwrap();
        assert!(!crew.join(Instant::now()));
        drop(hold);
        assert!(crew.join(Instant::now() + Duration::from_secs(60)));
    }
}
