//! A pair's diagnostics as text.

use std::io::{self, Write};

use crate::{
    cli::bytes,
    pair::{Diagnostics, PerSide},
};

/// Steps of a forward curve that are shown.
const STEPS: usize = 5;

pub(super) fn show(out: &mut impl Write, diagnostics: Option<&Diagnostics>) -> io::Result<()> {
    let Some(diagnostics) = diagnostics else {
        return writeln!(out, "no diagnostics are kept with this mapper\n");
    };
    let Diagnostics { r2, forward, cosine, concentration, effective_features, rows_per_feature, weight_bytes } =
        diagnostics;
    if let Some(map) = r2 {
        heat_map(out, "keys", &map.keys)?;
        heat_map(out, "values", &map.values)?;
    }
    if !forward.is_empty() {
        writeln!(out, "source layers in the order in which they add most, and the joint R² of keys / values so far:")?;
    }
    for curve in forward {
        let steps = curve.sources.iter().zip(curve.keys.iter().zip(&curve.values)).take(STEPS);
        let steps: Vec<String> =
            steps.map(|(source, (keys, values))| format!("+{source:<3} {keys:.2} / {values:.2}")).collect();
        writeln!(out, "  {:>3}  {}", curve.layer, steps.join("  "))?;
    }
    if !forward.is_empty() {
        writeln!(out)?;
    }
    if cosine.is_empty() {
        writeln!(out, "no cosines and no errors: the fit kept no documents to look at them (--selection)\n")?;
    }
    per_layer(out, "attention cosine, by target layer", cosine, 2)?;
    sides(out, "error where it is looked at, over its mean", concentration.as_ref(), 2)?;
    sides(out, "effective features", effective_features.as_ref(), 0)?;
    if let Some(rows) = rows_per_feature {
        writeln!(out, "rows per feature  {rows:.1}")?;
    }
    if let Some(size) = weight_bytes {
        writeln!(out, "weights           {}", bytes::shown(*size))?;
    }
    writeln!(out)
}

/// Hundredths of R², two digits each: target layers down, source layers across.
fn heat_map(out: &mut impl Write, side: &str, r2: &[Vec<f64>]) -> io::Result<()> {
    writeln!(out, "R² of {side}, in hundredths, by one source layer (across) of each target layer (down):")?;
    let widest = r2.iter().map(Vec::len).max().unwrap_or(0);
    let heading: String = (0..widest).map(|source| format!("{source:>3}")).collect();
    writeln!(out, "       {heading}")?;
    for (target, row) in r2.iter().enumerate() {
        // Rounding down what is 1 keeps the columns; what is below 0 explains nothing.
        let cells: String = row.iter().map(|r2| format!("{:>3.0}", (100.0 * r2).clamp(0.0, 99.0))).collect();
        writeln!(out, "  {target:>3}  {cells}")?;
    }
    writeln!(out)
}

fn sides(out: &mut impl Write, name: &str, sides: Option<&PerSide>, digits: usize) -> io::Result<()> {
    let Some(PerSide { keys, values }) = sides else { return Ok(()) };
    per_layer(out, &format!("{name}, keys, by mapped target layer"), keys, digits)?;
    per_layer(out, &format!("{name}, values, by mapped target layer"), values, digits)
}

/// A figure of each layer, ten to a line.
fn per_layer(out: &mut impl Write, heading: &str, figures: &[f64], digits: usize) -> io::Result<()> {
    if figures.is_empty() {
        return Ok(());
    }
    writeln!(out, "{heading}:")?;
    for line in figures.chunks(10) {
        let cells: Vec<String> = line.iter().map(|x| format!("{x:>7.digits$}")).collect();
        writeln!(out, "  {}", cells.join(""))?;
    }
    writeln!(out)
}
