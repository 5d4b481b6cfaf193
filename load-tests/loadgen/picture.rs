//! The picture of a run: what share of requests was served within which time, and how that went over the run. Plain SVG.

use crate::pace::Ran;
use crate::report::{Distributions, Micros};
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 40.0;
/// Room below each panel for its axis.
const BELOW: f64 = 60.0;
/// Points of a curve.
const POINTS: usize = 200;
/// Parts of the run in the second panel.
const PARTS: usize = 60;

const COLOURS: [&str; 3] = ["#1f6feb", "#d1690b", "#2da44e"];

/// Draws it.
pub fn picture(title: &str, ran: &Ran, of: &Distributions, is_open_loop: bool) -> String {
    let height = 2.0 * (TOP + HEIGHT + BELOW);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {height}\" width=\"{w}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{title}</text>\n",
        w = WIDTH + LEFT + 40.0,
        title = escaped(title),
    );
    shares(&mut svg, of);
    over_time(&mut svg, ran, is_open_loop);
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#444\">{}</text>",
        escaped(words)
    );
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn curve(svg: &mut String, points: &[(f64, f64)], colour: &str) {
    let points: Vec<String> = points
        .iter()
        .map(|(x, y)| format!("{x:.1},{y:.1}"))
        .collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
        points.join(" ")
    );
}

fn legend(svg: &mut String, top: f64, names: &[&str]) {
    for (at, name) in names.iter().enumerate() {
        let x = LEFT + 180.0 * at as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{}\" width=\"12\" height=\"4\" fill=\"{}\"/>",
            top - 12.0,
            COLOURS[at]
        );
        text(svg, (x + 18.0, top - 7.0), "start", name);
    }
}

/// The smallest and largest power of ten around some values.
fn decades(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|v| *v > 0.0)
        .fold((f64::MAX, f64::MIN), |(low, high), v| {
            (low.min(v), high.max(v))
        });
    if low > high {
        return (0.0, 1.0);
    }
    let (low, high) = (low.log10().floor(), high.log10().ceil());
    (low, high.max(low + 1.0))
}

/// How a number of milliseconds is written at an axis.
fn millis(power: f64) -> String {
    match power {
        p if p >= 3.0 => format!("{} s", 10f64.powf(p - 3.0)),
        p if p >= 0.0 => format!("{} ms", 10f64.powf(p)),
        p => format!("{} us", 10f64.powf(p + 3.0)),
    }
}

fn shares(svg: &mut String, of: &Distributions) {
    let all = [&of.ttft, &of.end_to_end, &of.inter_token];
    let ends = all
        .iter()
        .filter(|of| !of.is_empty())
        .flat_map(|of| [of.min().max(1), of.max()]);
    let (low, high) = decades(ends.map(|us| us as f64 / 1e3));
    let x = |ms: f64| LEFT + WIDTH * (ms.log10() - low) / (high - low);
    let y = |share: f64| TOP + HEIGHT * (1.0 - share);
    legend(
        svg,
        TOP,
        &["time to first token", "whole answer", "between tokens"],
    );
    for percent in [0, 25, 50, 75, 90, 99, 100] {
        let at = y(f64::from(percent) / 100.0);
        line(svg, (LEFT, at), (LEFT + WIDTH, at));
        if percent != 99 {
            text(svg, (LEFT - 8.0, at + 4.0), "end", &format!("{percent} %"));
        }
    }
    for power in low as i32..=high as i32 {
        let at = x(10f64.powi(power));
        line(svg, (at, TOP), (at, TOP + HEIGHT));
        text(
            svg,
            (at, TOP + HEIGHT + 18.0),
            "middle",
            &millis(f64::from(power)),
        );
    }
    text(
        svg,
        (LEFT, TOP + HEIGHT + 36.0),
        "start",
        "share of requests (tokens) that took at most so long",
    );
    for (of, colour) in all.into_iter().zip(COLOURS) {
        let at = |step: usize| -> (f64, f64) {
            let share = step as f64 / POINTS as f64;
            (x(of.value_at_quantile(share).max(1) as f64 / 1e3), y(share))
        };
        if !of.is_empty() {
            curve(svg, &(0..=POINTS).map(at).collect::<Vec<_>>(), colour);
        }
    }
}

fn over_time(svg: &mut String, ran: &Ran, is_open_loop: bool) {
    let top = TOP + HEIGHT + BELOW + TOP;
    let ended = ran
        .seen
        .iter()
        .map(|seen| (seen.done - ran.began).as_secs_f64());
    let all = ended.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let mut parts: Vec<(Micros, u32)> = (0..PARTS).map(|_| (crate::report::micros(), 0)).collect();
    for seen in &ran.seen {
        let begin = if is_open_loop { seen.due } else { seen.sent };
        let at = begin.saturating_duration_since(ran.began).as_secs_f64() / all;
        let (waits, failed) = &mut parts[((at * PARTS as f64) as usize).min(PARTS - 1)];
        match seen.first.filter(|_| seen.end.is_good()) {
            Some(first) => waits.saturating_record(((first - begin).as_micros() as u64).max(1)),
            None => *failed += u32::from(!seen.end.is_good()),
        }
    }
    let full = || parts.iter().filter(|(waits, _)| !waits.is_empty());
    let (low, high) = decades(
        full()
            .flat_map(|(w, _)| [w.value_at_quantile(0.5), w.value_at_quantile(0.99)])
            .map(|us| us as f64 / 1e3),
    );
    let y = |ms: f64| top + HEIGHT * (1.0 - (ms.log10() - low) / (high - low));
    let x = |part: usize| LEFT + WIDTH * (part as f64 + 0.5) / PARTS as f64;
    legend(svg, top, &["time to first token, median", "p99"]);
    text(
        svg,
        (LEFT + 380.0, top - 7.0),
        "start",
        "red: requests that failed",
    );
    for power in low as i32..=high as i32 {
        let at = y(10f64.powi(power));
        line(svg, (LEFT, at), (LEFT + WIDTH, at));
        text(
            svg,
            (LEFT - 8.0, at + 4.0),
            "end",
            &millis(f64::from(power)),
        );
    }
    for (quantile, colour) in [0.5, 0.99].into_iter().zip(COLOURS) {
        let waits = parts
            .iter()
            .enumerate()
            .filter(|(_, (waits, _))| !waits.is_empty());
        let points = waits
            .map(|(at, (waits, _))| (x(at), y(waits.value_at_quantile(quantile) as f64 / 1e3)));
        curve(svg, &points.collect::<Vec<_>>(), colour);
    }
    for (at, (_, failed)) in parts
        .iter()
        .enumerate()
        .filter(|(_, (_, failed))| *failed > 0)
    {
        let height = 4.0 * f64::from(*failed).ln_1p();
        let _ = writeln!(
            svg,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"6\" height=\"{height:.1}\" fill=\"#cf222e\"/>",
            x(at) - 3.0,
            top + HEIGHT - height
        );
    }
    for tenth in 0..=5 {
        let share = f64::from(tenth) / 5.0;
        text(
            svg,
            (LEFT + WIDTH * share, top + HEIGHT + 18.0),
            "middle",
            &format!("{:.0} s", all * share),
        );
    }
    text(
        svg,
        (LEFT, top + HEIGHT + 36.0),
        "start",
        "by when requests were due (closed loop: sent)",
    );
}
