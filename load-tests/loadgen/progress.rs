//! A line on standard error that says how far the run is: redrawn on a terminal, a new one now and then elsewhere.

use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const ON_TERMINAL: Duration = Duration::from_millis(200);
const ELSEWHERE: Duration = Duration::from_secs(10);
const BAR: usize = 30;

/// See the module.
pub struct Progress {
    all: usize,
    lasts: Duration,
    began: Instant,
    running: Cell<usize>,
    ended: Cell<usize>,
    failed: Cell<usize>,
    on_terminal: bool,
}

impl Progress {
    /// Of so many requests, and at most so long.
    pub fn new(all: usize, lasts: Duration) -> Self {
        Progress {
            all,
            lasts,
            began: Instant::now(),
            running: Cell::new(0),
            ended: Cell::new(0),
            failed: Cell::new(0),
            on_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// A request was sent.
    pub fn began(&self) {
        self.running.set(self.running.get() + 1);
    }

    /// It has ended.
    pub fn ended(&self, good: bool) {
        self.running.set(self.running.get() - 1);
        self.ended.set(self.ended.get() + 1);
        self.failed.set(self.failed.get() + usize::from(!good));
    }

    fn line(&self, elapsed: Duration) -> String {
        let by_count = self.ended.get() as f64 / self.all.max(1) as f64;
        let by_time = elapsed.as_secs_f64() / self.lasts.as_secs_f64();
        let share = by_count.max(by_time).min(1.0);
        let full = (share * BAR as f64) as usize;
        format!(
            "[{}{}] {:3.0} % {:4.0} s  {} ended, {} running, {} failed",
            "=".repeat(full),
            " ".repeat(BAR - full),
            share * 100.0,
            elapsed.as_secs_f64(),
            self.ended.get(),
            self.running.get(),
            self.failed.get(),
        )
    }

    fn draw(&self, end: &str) {
        let line = self.line(self.began.elapsed());
        let begin = if self.on_terminal { "\r" } else { "" };
        let _ = write!(std::io::stderr(), "{begin}{line}{end}");
    }

    /// Draws it again and again.
    pub async fn tick(&self) {
        let (every, end) = match self.on_terminal {
            true => (ON_TERMINAL, ""),
            false => (ELSEWHERE, "\n"),
        };
        let mut ticks = tokio::time::interval(every);
        ticks.tick().await; // the first comes at once
        loop {
            ticks.tick().await;
            self.draw(end);
        }
    }

    /// The last line.
    pub fn finish(&self) {
        self.draw("\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_how_far_it_is_by_what_is_nearer_to_the_end() {
        let progress = Progress::new(10, Duration::from_secs(100));
        (0..5).for_each(|_| progress.began());
        (0..4).for_each(|n| progress.ended(n > 0));
        let line = progress.line(Duration::from_secs(10));
        assert!(
            line.contains(" 40 %") && line.contains("4 ended, 1 running, 1 failed"),
            "{line}"
        );
        let late = progress.line(Duration::from_secs(90));
        assert!(late.contains(" 90 %"), "{late}");
    }
}
