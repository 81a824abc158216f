//! The latest output of a command for a caller who watches: a bounded amount at a bounded rate, the rest skipped and counted.

use proto::path::JsonBytes;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::limits::{RECENT_BYTES_MAX, RECENT_EVERY};

/// Makes an event of a stream's number, its latest bytes, and how many before them were skipped.
pub(crate) type RecentEvent<E> = Box<dyn Fn(u8, JsonBytes, u64) -> E + Send + Sync>;

/// What was written since the last event, of both streams.
pub(crate) struct Recent<E> {
    event: RecentEvent<E>,
    streams: [Latest; 2],
    /// When something may be sent again.
    next: Instant,
}

#[derive(Default)]
struct Latest {
    bytes: Vec<u8>,
    skipped: u64,
}

impl<E: Send> Recent<E> {
    pub(crate) fn new(event: RecentEvent<E>) -> Self {
        Self { event, streams: Default::default(), next: Instant::now() }
    }

    /// Takes output, and forgets what is not among the latest.
    pub(crate) fn add(&mut self, fd: u8, bytes: &[u8]) {
        let latest = &mut self.streams[usize::from(fd == 2)];
        let tail = &bytes[bytes.len().saturating_sub(RECENT_BYTES_MAX)..];
        let over = (latest.bytes.len() + tail.len()).saturating_sub(RECENT_BYTES_MAX);
        latest.bytes.drain(..over);
        latest.bytes.extend_from_slice(tail);
        latest.skipped += (over + bytes.len() - tail.len()) as u64;
    }

    /// When the next event is due; `None`: there is nothing to tell.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.streams.iter().any(|latest| !latest.bytes.is_empty()).then_some(self.next)
    }

    /// Sends what there is, if it is due and the caller has room: what a slow one has no room for waits, and is replaced by
    /// what comes later.
    pub(crate) fn send(&mut self, events: &mpsc::Sender<E>) {
        if self.next > Instant::now() {
            return;
        }
        self.next = Instant::now() + RECENT_EVERY;
        for (fd, latest) in [1, 2].into_iter().zip(&mut self.streams) {
            if latest.bytes.is_empty() {
                continue;
            }
            if let Ok(room) = events.try_reserve() {
                room.send(latest.take(fd, &self.event));
            }
        }
    }

    /// Sends what is left of a command that has ended; waits for a slow caller, but not for one who cancelled.
    pub(crate) async fn finish(&mut self, events: &mpsc::Sender<E>, cancel: &CancellationToken) {
        for (fd, latest) in [1, 2].into_iter().zip(&mut self.streams) {
            if latest.bytes.is_empty() {
                continue;
            }
            tokio::select! {
                _ = events.send(latest.take(fd, &self.event)) => {}
                () = cancel.cancelled() => {}
            }
        }
    }
}

impl Latest {
    fn take<E>(&mut self, fd: u8, event: &RecentEvent<E>) -> E {
        let Latest { bytes, skipped } = std::mem::take(self);
        event(fd, JsonBytes::new(&bytes), skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Event = (u8, Vec<u8>, u64);

    fn recent() -> Recent<Event> {
        Recent::new(Box::new(|fd, bytes: JsonBytes, skipped| (fd, bytes.decode().unwrap(), skipped)))
    }

    #[tokio::test(start_paused = true)]
    async fn much_output_is_a_little_now_and_then() {
        let (events, mut receiver) = mpsc::channel(1000);
        let (mut recent, chunk) = (recent(), vec![b'x'; 64 * 1024]);
        for _ in 0..16_384 {
            recent.add(1, &chunk);
            recent.send(&events);
            // A second for all of it.
            tokio::time::advance(std::time::Duration::from_micros(61)).await;
        }
        recent.add(2, b"the end");
        assert!(recent.due().is_some());
        recent.finish(&events, &CancellationToken::new()).await;
        assert!(recent.due().is_none());
        drop(events);
        let (mut sent, mut skipped, mut last) = (0, 0, None);
        while let Some(event) = receiver.recv().await {
            sent += event.1.len() as u64;
            skipped += event.2;
            last = Some(event);
        }
        assert_eq!(sent + skipped, (1 << 30) + 7);
        assert!(sent <= 12 * RECENT_BYTES_MAX as u64, "{sent}");
        assert_eq!(last, Some((2, b"the end".to_vec(), 0)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_who_does_not_read_holds_nothing_up() {
        let (events, mut receiver) = mpsc::channel(1);
        let mut recent = recent();
        for line in [&b"first"[..], b"second", b"third"] {
            recent.add(1, line);
            recent.send(&events);
            tokio::time::advance(RECENT_EVERY).await;
        }
        assert_eq!(receiver.recv().await, Some((1, b"first".to_vec(), 0)));
        recent.send(&events);
        assert_eq!(receiver.recv().await, Some((1, b"secondthird".to_vec(), 0)));
    }
}
