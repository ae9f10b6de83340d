//! How far a command has come: bars on a terminal; of a fit, a line now and then elsewhere.

use std::{
    io::{self, IsTerminal},
    ops::ControlFlow,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::fit::{Progress, Stage};

use super::{interrupt, say};

/// How often a line is printed where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);

/// The stage that is going on.
pub(super) struct FitProgress {
    terminal: bool,
    bar: ProgressBar,
    stage: Option<Stage>,
    /// Where the stage began: what an earlier run did is no measure of this one's speed.
    began: (Instant, usize),
    said: Instant,
}

impl FitProgress {
    pub(super) fn new() -> FitProgress {
        let now = Instant::now();
        let terminal = io::stderr().is_terminal();
        FitProgress { terminal, bar: ProgressBar::hidden(), stage: None, began: (now, 0), said: now }
    }

    /// Shows a step, and says whether to go on.
    pub(super) fn show(&mut self, progress: Progress) -> ControlFlow<()> {
        let begins = self.stage != Some(progress.stage);
        if begins {
            self.bar.finish_and_clear();
            self.stage = Some(progress.stage);
            self.began = (Instant::now(), progress.done);
        }
        if !self.terminal {
            let ends = progress.done == progress.total;
            if begins || ends || self.said.elapsed() >= EVERY {
                self.said = Instant::now();
                say(&format!("{}\n", line(progress, self.began.1, self.began.0.elapsed())));
            }
        } else {
            if begins {
                let bar = ProgressBar::new(progress.total as u64).with_position(progress.done as u64);
                bar.reset_eta();
                self.bar = styled(bar, unit(progress.stage), progress.stage.name());
            }
            self.bar.set_position(progress.done as u64);
        }
        if interrupt::came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// A bar for a model's prefill; drawn only on a terminal, and only once it takes a while.
pub(super) fn prefill_bar(tokens: usize, model: &str) -> ProgressBar {
    let bar = if io::stderr().is_terminal() { ProgressBar::new(tokens as u64) } else { ProgressBar::hidden() };
    styled(bar, "tokens", &format!("prefill on {model}"))
}

fn styled(bar: ProgressBar, unit: &str, message: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{{msg}} {{bar:32}} {{pos}}/{{len}} {unit}, {{eta}} left"));
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())).with_message(message.to_owned())
}

fn unit(stage: Stage) -> &'static str {
    match stage {
        Stage::Capture => "tokens",
        Stage::Selection | Stage::Diagnose | Stage::Evidence => "documents",
        _ => "steps",
    }
}

/// One line, with an estimate once there is something to go by.
fn line(Progress { stage, done, total }: Progress, began: usize, elapsed: Duration) -> String {
    let mut line = format!("{}: {done} of {total} {}", stage.name(), unit(stage));
    if done > began && done < total {
        let left = elapsed.as_secs_f64() * (total - done) as f64 / (done - began) as f64;
        line.push_str(&format!(", about {} left", span(left)));
    }
    line
}

/// Seconds as a person says them.
pub(super) fn span(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_estimates_by_this_run_alone() {
        let at = |done| Progress { stage: Stage::Capture, done, total: 1000 };
        assert_eq!(line(at(400), 400, Duration::ZERO), "capture: 400 of 1000 tokens");
        let expected = "capture: 500 of 1000 tokens, about 50 s left";
        assert_eq!(line(at(500), 400, Duration::from_secs(10)), expected);
        assert_eq!(line(at(1000), 400, Duration::from_secs(60)), "capture: 1000 of 1000 tokens");
    }

    #[test]
    fn spans() {
        let spans = [5.0, 300.0, 7200.0, 400_000.0].map(span);
        assert_eq!(spans, ["5 s", "5 min", "2.0 h", "5 days"]);
    }
}
