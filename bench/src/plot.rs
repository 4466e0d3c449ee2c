//! Plots as SVG: bars of weft and of its best peer, and distributions of latencies.

use std::fmt::Write as _;

use crate::line;
use crate::report::{LineReport, Report};

const WIDTH: f64 = 900.0;
/// Height of a row of bars, and of a panel of curves.
const ROW: f64 = 40.0;
const PANEL: f64 = 190.0;
/// Space left of the bars, and the longest bar.
const LEFT: f64 = 400.0;
const BAR: f64 = 300.0;
/// Colours of weft and of its peer.
const COLOURS: [&str; 2] = ["#1b6ca8", "#c9772b"];

/// Plots of a report, each with the name of its kind; those without any line are left out.
pub(crate) fn all(report: &Report) -> Vec<(&'static str, String)> {
    let lines = line::all();
    let measured: Vec<_> = lines.iter().filter_map(|line| report.lines.get(&line.name)).collect();
    let bars = |figure: fn(&LineReport) -> [f64; 2]| {
        let rows = measured.iter().map(|line| (*line, figure(line)));
        rows.filter(|(line, values)| line.latencies[0].is_empty() && values[0] > 0.0).collect()
    };
    let throughput: Vec<_> = bars(|line| line.gbit_per_second);
    let cpu: Vec<_> = bars(|line| line.cpu_per_gbit);
    let mut latency = measured.clone();
    latency.retain(|line| !line.latencies[0].is_empty());
    let machine = &report.machine;
    let mut plots = Vec::new();
    if !throughput.is_empty() {
        plots.push(("throughput", bar_chart(&format!("Gbit/s, {machine}"), &throughput)));
        let title = format!("CPU seconds of gateways and softirq per Gbit, {machine}");
        plots.push(("cpu-per-gbit", bar_chart(&title, &cpu)));
    }
    if !latency.is_empty() {
        plots.push(("latency", curves(&format!("Share of responses, {machine}"), &latency)));
    }
    plots
}

/// Two bars a row, as long as their share of the longer one.
fn bar_chart(title: &str, rows: &[(&LineReport, [f64; 2])]) -> String {
    let mut body = String::new();
    for (row, (line, values)) in rows.iter().enumerate() {
        let y = 40.0 + ROW * row as f64;
        let longest = values[0].max(values[1]);
        text(&mut body, (LEFT - 8.0, y + 19.0), "end", &line.title);
        for (side, (value, label)) in values.iter().zip(["weft", &line.best]).enumerate() {
            let (y, width) = (y + 15.0 * side as f64, BAR * value / longest);
            let colour = COLOURS[side];
            let _ = writeln!(
                body,
                r#"<rect x="{LEFT}" y="{y}" width="{width:.1}" height="14" fill="{colour}"/>"#
            );
            let label = format!("{value:.3} {label}");
            text(&mut body, (LEFT + width + 5.0, y + 11.0), "start", &label);
        }
    }
    svg(title, 50.0 + ROW * rows.len() as f64, &body)
}

/// A panel a line: milliseconds to the right, logarithmic, and shares upwards.
fn curves(title: &str, lines: &[&LineReport]) -> String {
    let mut body = String::new();
    for (panel, line) in lines.iter().enumerate() {
        let (top, height) = (60.0 + PANEL * panel as f64, PANEL - 60.0);
        let bottom = top + height;
        let times = || line.latencies.iter().flatten().map(|(_, ms)| ms.max(1e-6).log10());
        let low = times().fold(f64::INFINITY, f64::min).floor();
        let decades = (times().fold(f64::NEG_INFINITY, f64::max).ceil() - low).max(1.0);
        let x = |log: f64| 60.0 + (WIDTH - 260.0) * (log - low) / decades;
        text(&mut body, (60.0, top - 8.0), "start", &line.title);
        for decade in 0..=decades as u32 {
            let (log, x) = (low + f64::from(decade), x(low + f64::from(decade)));
            let _ = writeln!(body, r##"<path d="M{x:.1} {top}V{bottom}" stroke="#ccc"/>"##);
            text(&mut body, (x, bottom + 14.0), "middle", &format!("{} ms", 10_f64.powf(log)));
        }
        for (share, label) in [(0.0, "0"), (0.5, "p50"), (0.99, "p99")] {
            let y = bottom - height * share;
            let right = WIDTH - 200.0;
            let _ = writeln!(body, r##"<path d="M60 {y:.1}H{right}" stroke="#ccc"/>"##);
            text(&mut body, (55.0, y + 4.0), "end", label);
        }
        for (side, label) in ["weft", &line.best].into_iter().enumerate() {
            let colour = COLOURS[side];
            let points = line.latencies[side].iter().map(|(share, ms)| {
                format!("{:.1},{:.1} ", x(ms.max(1e-6).log10()), bottom - height * share)
            });
            let points: String = points.collect();
            let _ = writeln!(
                body,
                r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>"#
            );
            let y = top + 20.0 + 18.0 * side as f64;
            let _ = writeln!(
                body,
                r#"<rect x="{}" y="{}" width="12" height="12" fill="{colour}"/>"#,
                WIDTH - 180.0,
                y - 10.0
            );
            text(&mut body, (WIDTH - 162.0, y), "start", label);
        }
    }
    svg(title, 60.0 + PANEL * lines.len() as f64, &body)
}

fn svg(title: &str, height: f64, body: &str) -> String {
    let mut heading = String::new();
    text(&mut heading, (10.0, 20.0), "start", title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{heading}{body}</svg>\n"
    )
}

fn text(body: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(body, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#);
}

#[cfg(test)]
mod tests {
    use crate::report::tests::report;

    use super::*;

    #[test]
    fn bars_are_in_proportion_and_latencies_have_curves() {
        let plots = all(&report(&["tcp-1", "requests-idle"]));
        let names: Vec<_> = plots.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["throughput", "cpu-per-gbit", "latency"]);
        let [(_, throughput), _, (_, latency)] = &plots[..] else { panic!("{names:?}") };
        assert!(throughput.contains(r#"width="300.0""#) && throughput.contains(r#"width="150.0""#));
        assert_eq!(throughput.matches("TCP, 1 flow<").count(), 1);
        assert_eq!(latency.matches("<polyline").count(), 2);
        assert!(latency.contains(">1 ms<") && latency.contains("request/response, idle"));
    }
}
