//! A few threads that copy and verify where no caller waits.

use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use parking_lot::Mutex;

/// A piece of work.
pub type Task = Box<dyn FnOnce() + Send>;

/// A fixed pool. Tasks must not wait for other tasks of the same pool.
pub struct Workers {
    queue: Mutex<Option<Sender<Task>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// A pool of `count` threads with this name.
    pub fn new(name: &str, count: usize) -> std::io::Result<Self> {
        let (queue, tasks) = unbounded::<Task>();
        let threads = (0..count)
            .map(|_| {
                let tasks = tasks.clone();
                std::thread::Builder::new()
                    .name(name.into())
                    .spawn(move || tasks.iter().for_each(|task| task()))
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Workers {
            queue: Mutex::new(Some(queue)),
            threads: Mutex::new(threads),
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

    /// Finishes what was queued and ends the threads.
    pub fn stop(&self) {
        self.queue.lock().take();
        for thread in self.threads.lock().drain(..) {
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
