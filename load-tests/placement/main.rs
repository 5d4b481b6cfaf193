//! Compares policies of placement in virtual time: the router's own, by their own code, and others, by their published
//! formulas, on the scheduler and the caches of the simulator. The same seed gives the same numbers.

mod beliefs;
mod draw;
mod engine;
mod mixes;
mod numbers;
mod outcome;
mod policies;
mod rates;
mod request;
mod router;
mod scenario;
mod svg;
mod table;
mod trace;
mod verdict;
mod world;

use clap::Parser;
use outcome::Outcome;
use scenario::{Case, KINDS, Kind};
use std::io::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use table::Row;
use trace::Line;

/// Which policy places prompts best, and where the router's own does not
///
/// Eight engines of a small model (the simulator's scheduler, prefix cache and step times) serve requests that come at random
/// times, at a share of what the fleet can do; that is measured beforehand with a closed loop placed by the oracle. Nothing
/// sleeps: minutes of a fleet take milliseconds here, and one seed always gives the same numbers.
///
/// The router's own policies are its own code (routing::choose with the real index); `exact` knows caches by engines' events,
/// `approximate` by what was sent. The first fifth of each run fills caches and is not measured. A ratio below 1 is faster
/// than round robin.
#[derive(Debug, Parser)]
#[command(
    after_help = "EXAMPLES:\n  placement --quick                             a first look, in seconds\n  placement --kinds burst --loads 70 90 --details\n  placement --json all.json --svg all.svg       everything, 20 seeds, some minutes\n  placement --trace FILE --kinds mooncake       a trace in Mooncake's format instead of one made alike\n  placement --check                             fails where the defaults miss what they have to fulfil"
)]
struct Args {
    /// Kinds of scenarios, by name; all by default
    #[arg(long, num_args = 1..)]
    kinds: Vec<String>,
    /// Loads, in percent of the capacity
    #[arg(long, num_args = 1.., default_values_t = [30, 50, 70, 90, 100, 120])]
    loads: Vec<u32>,
    /// Policies, by name; all by default. Round robin and the oracle always run, as others are compared with them
    #[arg(long, num_args = 1..)]
    policies: Vec<String>,
    /// How many seeds
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// Requests of each run
    #[arg(long, default_value_t = 1000)]
    requests: usize,
    /// A small run: two loads, one seed, 300 requests
    #[arg(long)]
    quick: bool,
    /// A trace in Mooncake's format (one JSON object a line), from which the kind `mooncake` takes its requests
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Prints all numbers of every scenario, too
    #[arg(long)]
    details: bool,
    /// Writes all numbers of every seed to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draws the TTFT p99 ratios into this file
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Exits with 1 unless the defaults (exact, approximate) have a TTFT p99 of at most 1.05 times round robin's, at most 1 %
    /// of the time with a queue beside an idle worker, and at least 95 % of the oracle's hits at loads up to 70 %
    #[arg(long)]
    check: bool,
}

impl Args {
    fn scaled(mut self) -> Self {
        if self.quick {
            self.loads = vec![50, 90];
            self.seeds = 1;
            self.requests = 300;
        }
        self
    }

    fn kinds(&self) -> std::io::Result<Vec<Kind>> {
        let known = KINDS.map(|kind| kind.name);
        checked("kind", &self.kinds, &known)?;
        let asked =
            |kind: &Kind| self.kinds.is_empty() || self.kinds.iter().any(|of| of == kind.name);
        Ok(KINDS.into_iter().filter(asked).collect())
    }

    fn policies(&self) -> std::io::Result<Vec<&'static str>> {
        let known = policies::ALL.map(|(name, _)| name);
        checked("policy", &self.policies, &known)?;
        let asked = |name: &&'static str| {
            let always = [policies::BASE, policies::ORACLE].contains(name);
            always || self.policies.is_empty() || self.policies.iter().any(|of| of == name)
        };
        Ok(known.into_iter().filter(asked).collect())
    }
}

fn checked(what: &str, asked: &[String], known: &[&str]) -> std::io::Result<()> {
    match asked.iter().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Error::other(format!(
            "there is no {what} `{name}`; there are: {}",
            known.join(", ")
        ))),
    }
}

fn main() -> ExitCode {
    match run(&Args::parse().scaled()) {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            faults.iter().for_each(|fault| eprintln!("{fault}"));
            ExitCode::FAILURE
        }
        Err(fault) => {
            eprintln!("placement: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// Answers what `--check` found.
fn run(args: &Args) -> std::io::Result<Vec<String>> {
    if args.requests < 10 || args.seeds == 0 || args.loads.contains(&0) {
        return Err(Error::other(
            "at least 10 requests, one seed, and a load above 0",
        ));
    }
    let trace = args.trace.as_deref().map(trace::read).transpose()?;
    let (kinds, policies) = (args.kinds()?, args.policies()?);
    let mut rows = Vec::new();
    for kind in kinds {
        rows.extend(measure(kind, args, &policies, trace.as_deref()));
    }
    eprintln!();
    print!("{}", table::markdown(&rows, args.details));
    if let Some(path) = &args.json {
        let json = serde_json::to_string(&rows).map_err(Error::other)?;
        std::fs::write(path, json)?;
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, svg::draw(&rows))?;
    }
    Ok(match args.check {
        true => verdict::faults(&rows),
        false => Vec::new(),
    })
}

/// All loads and policies of one kind, over all seeds.
fn measure(kind: Kind, args: &Args, policies: &[&'static str], trace: Option<&[Line]>) -> Vec<Row> {
    let mut capacity = None;
    let by_policy: Vec<(&'static str, Vec<Outcome>)> =
        policies.iter().map(|name| (*name, Vec::new())).collect();
    let mut by_load = vec![by_policy; args.loads.len()];
    for seed in 0..args.seeds {
        let case: Case = kind.case(seed, args.requests, trace);
        let capacity = *capacity.get_or_insert_with(|| case.capacity());
        for (load, outcomes) in args.loads.iter().zip(&mut by_load) {
            eprint!(
                "\r{}: seed {} of {}, load {load} % of {capacity:.1} requests/s      ",
                kind.name,
                seed + 1,
                args.seeds
            );
            for (name, outcomes) in outcomes {
                if let Some(policy) = policies::make(name) {
                    outcomes.push(case.run(policy, capacity * f64::from(*load) / 100.0));
                }
            }
        }
    }
    let loads = args.loads.iter().zip(by_load);
    loads
        .flat_map(|(load, outcomes)| table::rows(kind.name, *load, outcomes))
        .collect()
}
