//! One suite for all engines, and what the queue promises.

use crossbeam_channel::{Receiver, unbounded as channel};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use super::lone::Lone;
use super::queue::{Next, Piece, Queue, Step};
use super::*;
use crate::buf::Pages;
use crate::clock::SystemClock;
use crate::device::file::FileDevice;
use crate::device::sim::{Fault, Op as SimOp, SimDevice};
use crate::tests::Random;

const PAGE: usize = 4096;

fn limits() -> Limits {
    Limits {
        inflight_bytes: 4 << 20,
        emulate_gbs: None,
        clock: Arc::new(SystemClock),
    }
}

/// Runs a test over every engine, on a file of `bytes` bytes.
fn over_all(bytes: u64, test: impl Fn(Arc<dyn Engine>, &std::path::Path)) {
    for kind in [EngineKind::IoUring, EngineKind::Threads] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        let device = Arc::new(FileDevice::create(&path, bytes).unwrap());
        test(start(kind, device, &limits()).unwrap(), &path);
    }
}

fn op(kind: Kind, offset: u64, buf: &Arc<Pages>) -> (Op, Receiver<io::Result<()>>) {
    let (send, receive) = channel();
    let op = Op {
        kind,
        offset,
        len: buf.len(),
        // SAFETY: the tests look at the memory after the answer only.
        buf: unsafe { buf.io() },
        urgent: false,
        done: Box::new(move |result| {
            let _ = send.send(result);
        }),
    };
    (op, receive)
}

fn filled(pages: usize, byte: u8) -> Arc<Pages> {
    let mut buf = Pages::new(pages);
    buf.fill(byte);
    Arc::new(buf)
}

#[test]
fn random_operations_agree_with_an_array_of_bytes() {
    const PAGES: usize = 4096;
    over_all((PAGES * PAGE) as u64, |engine, path| {
        let mut model = vec![0u8; PAGES * PAGE];
        let mut random = Random(1);
        for round in 0..12 {
            // Disjoint stretches of all sizes at once, half of them read.
            let (mut at, mut flying) = (0, Vec::new());
            loop {
                let pages = 1 + random.below(if round % 3 == 0 { 700 } else { 40 }) as usize;
                if at + pages > PAGES {
                    break;
                }
                let write = random.below(2) == 0;
                let buf = filled(pages, random.below(256) as u8);
                let kind = if write { Kind::Write } else { Kind::Read };
                let (mut op, answer) = op(kind, (at * PAGE) as u64, &buf);
                op.urgent = random.below(2) == 0;
                engine.submit(op);
                flying.push((write, at * PAGE, buf, answer));
                at += pages;
            }
            for (write, at, buf, answer) in flying {
                answer.recv().unwrap().unwrap();
                let expected = &mut model[at..at + buf.len()];
                if write {
                    expected.copy_from_slice(&buf);
                } else {
                    assert!(buf[..] == *expected, "{} at {at}", engine.name());
                }
            }
        }
        assert!(engine.close(None));
        assert!(std::fs::read(path).unwrap() == model);
    });
}

#[test]
fn close_completes_what_is_in_flight_and_then_refuses() {
    over_all(64 << 20, |engine, path| {
        let buf = filled(64, 7);
        let answers: Vec<_> = (0..200)
            .map(|i| {
                let (op, answer) = op(Kind::Write, i * buf.len() as u64, &buf);
                engine.submit(op);
                answer
            })
            .collect();
        assert!(engine.close(None));
        for answer in answers {
            answer.try_recv().unwrap().unwrap();
        }
        let (late, answer) = op(Kind::Write, 0, &buf);
        engine.submit(late);
        assert!(answer.try_recv().unwrap().is_err());
        let file = std::fs::File::open(path).unwrap();
        let mut last = vec![0; PAGE];
        file.read_exact_at(&mut last, 200 * buf.len() as u64 - PAGE as u64)
            .unwrap();
        assert_eq!(last, vec![7; PAGE]);
        assert_eq!(Arc::strong_count(&buf), 1, "no operation keeps its buffer");
    });
}

#[test]
fn the_end_of_the_device_is_an_error_not_a_short_success() {
    over_all(1 << 20, |engine, _| {
        let buf = filled(4, 0);
        let (read, answer) = op(Kind::Read, (1 << 20) - 2 * PAGE as u64, &buf);
        engine.submit(read);
        assert_eq!(
            answer.recv().unwrap().unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    });
}

#[test]
fn callbacks_may_submit_and_may_panic() {
    over_all(1 << 20, |engine, _| {
        let buf = filled(1, 3);
        let (mut first, _) = op(Kind::Write, 0, &filled(1, 4));
        first.done = Box::new(|_| panic!("a test's own panic"));
        engine.submit(first);
        let (mut second, _) = op(Kind::Write, 4096, &buf);
        let (third, answer) = op(Kind::Read, 4096, &buf);
        let again = engine.clone();
        second.done = Box::new(move |_| again.submit(third));
        engine.submit(second);
        answer.recv().unwrap().unwrap();
    });
}

#[test]
fn an_attended_read_is_complete_in_time_or_comes_later() {
    let never = Duration::from_secs(3600);
    over_all(4 << 20, |engine, _| {
        let (write, answer) = op(Kind::Write, 0, &filled(512, 8));
        engine.submit(write);
        answer.recv().unwrap().unwrap();
        // Alone; late at once; beside others, which it may not hold up; larger than a piece.
        for (pages, others, patience) in [
            (16, 0, never),
            (16, 0, Duration::from_nanos(1)),
            (16, 0, Duration::ZERO),
            (16, 20, never),
            (16, 20, Duration::from_nanos(1)),
            (512, 0, never),
        ] {
            let beside: Vec<_> = (0..others)
                .map(|i| {
                    let (other, answer) = op(Kind::Write, (512 + i) * PAGE as u64, &filled(1, 1));
                    engine.submit(other);
                    answer
                })
                .collect();
            let buf = filled(pages, 0);
            let (read, answer) = op(Kind::Read, 0, &buf);
            engine.attend(read, Instant::now() + patience);
            answer.recv().unwrap().unwrap();
            assert!(buf.iter().all(|&b| b == 8));
            beside.iter().for_each(|a| a.recv().unwrap().unwrap());
        }
        let (beyond, answer) = op(Kind::Read, (4 << 20) - PAGE as u64, &filled(4, 0));
        engine.attend(beyond, Instant::now() + never);
        let error = answer.recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let (late, answer) = op(Kind::Read, 0, &filled(16, 0));
        engine.attend(late, Instant::now() + Duration::from_nanos(1));
        assert!(engine.close(None), "which waits for a read that is late");
        answer.try_recv().unwrap().unwrap();
        let (refused, answer) = op(Kind::Read, 0, &filled(16, 0));
        engine.attend(refused, Instant::now() + never);
        assert!(answer.try_recv().unwrap().is_err());
    });
}

#[test]
fn a_read_that_is_alone_needs_no_thread_of_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let device = FileDevice::create(&dir.path().join("device"), 1 << 20).unwrap();
    let lone = match Lone::get() {
        Ok(lone) => lone,
        Err(e) => return eprintln!("skipped: no asynchronous I/O on this machine ({e})"),
    };
    let mut queue = queue_with(&[], 1 << 20);
    for offset in [0, (1 << 20) - PAGE as u64] {
        let buf = filled(4, 1);
        let piece = queue.begin_alone(op(Kind::Read, offset, &buf).0);
        let piece = piece.unwrap_or_else(|_| panic!("nothing is beside it"));
        // SAFETY: the memory lives until the answer.
        unsafe { lone.send(device.raw_fd().unwrap(), &piece) }.unwrap();
        let answer = std::iter::from_fn(|| Some(lone.wait(Instant::now())));
        let answer = answer.flatten().next().unwrap();
        assert_eq!(
            piece.is_whole(answer),
            offset == 0,
            "{answer} bytes at {offset}"
        );
        assert!(offset > 0 || buf.iter().all(|&b| b == 0));
        assert!(queue.settle(piece, Ok(())).is_some());
    }
    assert!(lone.wait(Instant::now()).is_none(), "nothing is under way");
    lone.give_back();
}

#[test]
fn a_read_that_is_taken_back_is_the_next_and_whole() {
    let read = |pages| op(Kind::Read, 8 << 12, &filled(pages, 0)).0;
    let mut queue = queue_with(&[], 1 << 20);
    assert!(!queue.wants());
    assert!(queue.begin_alone(read(1000)).is_err(), "more than a piece");
    let piece = queue.begin_alone(read(4)).unwrap_or_else(|_| panic!());
    assert!(!queue.wants() && queue.begin_alone(read(4)).is_err());
    assert!(queue.push(read(2)).is_ok() && queue.wants());
    queue.take_back(piece);
    let (first, second) = (next(&mut queue).unwrap(), next(&mut queue).unwrap());
    assert_eq!((first.offset(), first.memory().1), (8 << 12, 4 * PAGE));
    assert_eq!(second.memory().1, 2 * PAGE);
    for piece in [first, second] {
        assert!(queue.settle(piece, Ok(())).is_some());
    }
    queue.close();
    assert!(queue.is_finished() && queue.wants() && queue.begin_alone(read(1)).is_err());
}

#[test]
fn a_read_lets_go_of_its_memory_before_it_says_so_and_a_write_after() {
    over_all(1 << 20, |engine, _| {
        for (kind, held) in [(Kind::Write, true), (Kind::Read, false)] {
            let buf = filled(4, 5);
            let (mut op, _) = op(kind, 0, &buf);
            let (send, answer) = channel();
            let watched = Arc::downgrade(&buf);
            op.done = Box::new(move |_| send.send(watched.strong_count()).unwrap());
            engine.submit(op);
            assert_eq!(answer.recv().unwrap(), 1 + usize::from(held));
        }
    });
}

#[test]
fn registered_memory_can_come_and_go() {
    over_all(1 << 20, |engine, _| {
        for round in 0..3 {
            let buf = filled(16, round);
            let regions = engine.register(buf.as_ptr() as usize, buf.len());
            for _ in 0..4 {
                for kind in [Kind::Write, Kind::Read] {
                    let (op, answer) = op(kind, 0, &buf);
                    engine.submit(op);
                    answer.recv().unwrap().unwrap();
                }
            }
            engine.unregister(&regions);
            assert_eq!(buf[PAGE], round);
        }
    });
}

#[test]
fn short_transfers_are_completed_and_passing_errors_are_tried_again() {
    let sim = Arc::new(SimDevice::new(1 << 20, 1));
    sim.inject(SimOp::Write, 0, Fault::Short(PAGE + 512));
    sim.inject(SimOp::Write, 1, Fault::Errno(libc::EINTR));
    sim.inject(SimOp::Write, 2, Fault::Short(512));
    sim.inject(SimOp::Read, 0, Fault::Short(2 * PAGE));
    sim.inject(SimOp::Read, 1, Fault::Errno(libc::EAGAIN));
    let engine = start(EngineKind::Auto, sim.clone(), &limits()).unwrap();
    assert_eq!(engine.name(), "threads", "a device without a descriptor");
    let out = filled(8, 9);
    let (write, answer) = op(Kind::Write, 0, &out);
    engine.submit(write);
    answer.recv().unwrap().unwrap();
    let back = filled(8, 0);
    let (read, answer) = op(Kind::Read, 0, &back);
    engine.submit(read);
    answer.recv().unwrap().unwrap();
    assert!(back[..] == out[..] && sim.count(SimOp::Write) == 4);
}

#[test]
fn one_failed_piece_fails_its_operation_only() {
    let sim = Arc::new(SimDevice::new(16 << 20, 1));
    sim.inject(SimOp::Write, 2, Fault::Errno(libc::EIO));
    let engine = start(EngineKind::Threads, sim.clone(), &limits()).unwrap();
    let buf = filled(6 << 8, 1);
    let (write, failed) = op(Kind::Write, 0, &buf);
    engine.submit(write);
    assert_eq!(
        failed.recv().unwrap().unwrap_err().raw_os_error(),
        Some(libc::EIO)
    );
    let (write, fine) = op(Kind::Write, 0, &buf);
    engine.submit(write);
    fine.recv().unwrap().unwrap();
    assert!(engine.close(None));
}

#[test]
fn a_hung_device_does_not_hang_close() {
    let sim = Arc::new(SimDevice::new(16 << 20, 1));
    for nth in 0..8 {
        sim.inject(SimOp::Write, nth, Fault::Hang); // as many as there are threads
    }
    let engine = start(EngineKind::Threads, sim.clone(), &limits()).unwrap();
    let buf = filled(64, 1);
    let answers: Vec<_> = (0..20)
        .map(|i| {
            let (write, answer) = op(Kind::Write, i * buf.len() as u64, &buf);
            engine.submit(write);
            answer
        })
        .collect();
    while sim.count(SimOp::Write) < 8 {
        std::thread::yield_now();
    }
    assert!(!engine.close(Some(Instant::now() + Duration::from_millis(20))));
    for answer in &answers[8..] {
        assert!(
            answer.try_recv().unwrap().is_err(),
            "what was not sent fails at the deadline"
        );
    }
    assert!(
        answers[0].try_recv().is_err(),
        "what is in flight keeps its buffer"
    );
    assert!(Arc::strong_count(&buf) > 8);
    sim.release();
    for answer in &answers[..8] {
        answer.recv().unwrap().unwrap();
    }
}

#[test]
fn an_emulated_device_is_as_slow_as_asked() {
    over_all(32 << 20, |engine, path| {
        let slow = Limits {
            emulate_gbs: Some(0.1),
            ..limits()
        };
        let kind = if engine.name() == "threads" {
            EngineKind::Threads
        } else {
            EngineKind::IoUring
        };
        let device = Arc::new(FileDevice::open(path, true).unwrap());
        let engine = start(kind, device, &slow).unwrap();
        let buf = filled(256, 1);
        let begin = Instant::now();
        let answers: Vec<_> = (0..10)
            .map(|i| {
                let (write, answer) = op(Kind::Write, i << 20, &buf);
                engine.submit(write);
                answer
            })
            .collect();
        answers.iter().for_each(|a| a.recv().unwrap().unwrap());
        // 10 MiB have to pass: 105 ms.
        assert!(
            begin.elapsed() >= Duration::from_millis(104),
            "{:?}",
            begin.elapsed()
        );
    });
}

fn queue_with(ops: &[(Kind, bool, usize)], limit: usize) -> Queue {
    let mut queue = Queue::new(limit, None, Instant::now());
    for &(kind, urgent, pages) in ops {
        let (mut op, _) = op(kind, 0, &filled(pages, 0));
        op.urgent = urgent;
        assert!(queue.push(op).is_ok());
    }
    queue
}

fn next(queue: &mut Queue) -> Option<Piece> {
    match queue.next(Instant::now()) {
        Next::Piece(piece) => Some(piece),
        Next::Wait(_) => panic!("no pace was set"),
        Next::Nothing => None,
    }
}

#[test]
fn reads_go_first_but_leave_writes_a_share() {
    let mut ops = vec![(Kind::Write, false, 1); 3];
    ops.extend([(Kind::Read, false, 1); 8]);
    ops.extend([(Kind::Read, true, 2); 2]);
    let mut queue = queue_with(&ops, 1 << 20);
    let order: Vec<_> = std::iter::from_fn(|| next(&mut queue))
        .map(|p| (p.kind, p.memory().1 / PAGE))
        .collect();
    let (read, write) = ((Kind::Read, 1), (Kind::Write, 1));
    let expected = [
        &[(Kind::Read, 2); 2][..], // urgent
        &[write],                  // after four pages of reads
        &[read; 4],
        &[write],
        &[read; 4],
        &[write],
    ];
    assert_eq!(order, expected.concat());
}

#[test]
fn bytes_in_flight_are_bounded_and_reads_find_room_beside_writes() {
    let mut queue = queue_with(&[(Kind::Write, false, 1024); 2], 4 << 20);
    let mut flying: Vec<_> = std::iter::from_fn(|| next(&mut queue)).collect();
    assert_eq!(flying.len(), 4);
    let (read, _) = op(Kind::Read, 0, &filled(256, 0));
    assert!(queue.has_room() && queue.push(read).is_ok());
    assert_eq!(next(&mut queue).map(|p| p.kind), Some(Kind::Read));
    assert!(!queue.has_room() && next(&mut queue).is_none());
    for _ in 0..2 {
        queue.settle(flying.remove(0), Ok(()));
    }
    assert_eq!(next(&mut queue).map(|p| p.kind), Some(Kind::Write));

    let mut queue = queue_with(&[(Kind::Write, false, 300)], PAGE);
    let only = next(&mut queue);
    assert_eq!(
        only.map(|p| p.memory().1),
        Some(300 * PAGE),
        "one may always go"
    );
}

#[test]
fn a_piece_is_never_taken_for_complete_too_early() {
    let mut queue = queue_with(&[(Kind::Read, false, 4)], 1 << 20);
    let mut piece = next(&mut queue).unwrap();
    let (start, offset) = (piece.memory().0 as usize, piece.offset());
    assert!(matches!(piece.advance(Ok(PAGE + 100)), Step::Again));
    assert_eq!(
        (piece.memory().0 as usize, piece.memory().1),
        (start + PAGE, 3 * PAGE)
    );
    assert_eq!(piece.offset(), offset + PAGE as u64);
    assert!(matches!(piece.advance(Ok(100)), Step::Again));
    let eintr = || Err(io::Error::from_raw_os_error(libc::EINTR));
    assert!(matches!(piece.advance(eintr()), Step::Again));
    assert!(
        matches!(piece.advance(Ok(4 * PAGE)), Step::Settled(Err(_))),
        "more than was asked"
    );
    assert!(matches!(piece.advance(Ok(0)), Step::Settled(Err(_))));
    assert!(matches!(piece.advance(Ok(3 * PAGE)), Step::Settled(Ok(()))));
    let gives_up = (0..1000).any(|_| matches!(piece.advance(eintr()), Step::Settled(Err(_))));
    assert!(gives_up, "a passing error that does not pass is an error");
}
