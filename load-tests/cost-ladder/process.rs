//! Programs under measurement: started, read, and ended with the value that stands for them.

use std::io;
use std::process::{Child, Command, Stdio};

/// Clock ticks per second of /proc/PID/stat.
const TICKS: f64 = 100.0;

/// A child process that ends with this value.
pub struct Process(Child);

impl Process {
    /// This program once more, with other words.
    pub fn again(words: &[String]) -> io::Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .args(words)
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Process(child))
    }

    /// One that runs already.
    pub fn of(child: Child) -> Self {
        Process(child)
    }

    /// CPU seconds so far, children included.
    pub fn cpu(&self) -> f64 {
        let pid = self.0.id();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|c| c.parse().ok());
        own_cpu(pid) + children.map(own_cpu).sum::<f64>()
    }

    /// Resident bytes.
    pub fn resident(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.0.id()));
        let pages = statm.unwrap_or_default();
        let pages = pages
            .split(' ')
            .nth(1)
            .and_then(|pages| pages.parse::<u64>().ok());
        pages.unwrap_or(0) * 4096
    }
}

fn own_cpu(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.filter_map(|n| n.parse::<f64>().ok()).sum::<f64>() / TICKS
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGTERM, not a kill: nginx must end its workers too, or they keep the port
        let asked = Command::new("kill").arg(self.0.id().to_string()).status();
        if !asked.is_ok_and(|status| status.success()) {
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}
