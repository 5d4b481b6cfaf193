//! A heat map of the TTFT p99 ratios: scenarios down, policies across; green is faster than round robin, red slower.

use crate::table::Row;
use std::fmt::Write;

const CELL: (usize, usize) = (64, 20);
const LEFT: usize = 190;
const TOP: usize = 110;

/// Draws it.
pub fn draw(rows: &[Row]) -> String {
    let scenarios: Vec<&[Row]> = rows.chunk_by(|a, b| a.scenario() == b.scenario()).collect();
    let across = scenarios.iter().map(|row| row.len()).max().unwrap_or(0);
    let (width, height) = (
        LEFT + across * CELL.0 + 50,
        TOP + scenarios.len() * CELL.1 + 10,
    );
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"18\" font-size=\"13\">TTFT p99 against round robin's</text>\n"
    );
    for (at, row) in scenarios
        .first()
        .into_iter()
        .flat_map(|of| of.iter())
        .enumerate()
    {
        let x = LEFT + at * CELL.0 + CELL.0 / 2;
        let y = TOP - 6;
        let _ = writeln!(
            svg,
            "<text transform=\"translate({x},{y}) rotate(-40)\">{}</text>",
            row.policy
        );
    }
    for (down, scenario) in scenarios.iter().enumerate() {
        let y = TOP + down * CELL.1;
        let _ = writeln!(
            svg,
            "<text x=\"8\" y=\"{}\">{}</text>",
            y + 14,
            scenario[0].scenario()
        );
        for (at, row) in scenario.iter().enumerate() {
            let x = LEFT + at * CELL.0;
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{}\"/><text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{:.2}</text>",
                CELL.0 - 1,
                CELL.1 - 1,
                color(row.p99_ratio),
                x + CELL.0 / 2,
                y + 14,
                row.p99_ratio
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// White at 1; full green at a fifth, full red at five times.
fn color(ratio: f64) -> String {
    let strength = (ratio.max(0.01).ln() / 5f64.ln()).clamp(-1.0, 1.0);
    let faded = (255.0 - 155.0 * strength.abs()) as u8;
    match strength > 0.0 {
        true => format!("rgb(255,{faded},{faded})"),
        false => format!("rgb({faded},255,{faded})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::row;

    #[test]
    fn each_row_is_a_cell_green_when_faster_and_red_when_slower() {
        let svg = draw(&[row("exact", 50, 0.2, 1.0), row("sglang", 50, 5.0, 1.0)]);
        assert!(svg.contains("rgb(100,255,100)") && svg.contains("rgb(255,100,100)"));
        assert_eq!(svg.matches("text-anchor").count(), 2);
        assert_eq!(color(1.0), "rgb(255,255,255)");
    }
}
