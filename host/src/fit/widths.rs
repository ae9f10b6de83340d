//! Which width the networks of an mlp have: one for the pair, by what it is worth against what it costs (METHOD §4).
//!
//! Half, the whole and twice the given width are trained, and each is tried as it will run on the selection documents. The
//! narrowest wins whose KL is within one standard error of the best's.

use std::ops::ControlFlow;

use super::{
    FitError, FitOptions, MapperKind, Progress,
    choose::smallest_as_good,
    ends::{Document, Tools, attempt},
    fitted::Fitted,
    mlp,
};
use crate::pair::{Draft, PairError, WidthPoint};

/// Makes the networks that options ask for.
type Train<'a> = dyn Fn(&FitOptions, &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<Fitted, FitError> + 'a;

/// The options with the chosen width, and what was found of each. `train` makes the networks that options ask for, `draft` a
/// pair of them.
pub(super) fn choose(
    (options, settings): (&FitOptions, &mlp::Settings),
    tools: Tools<'_>,
    documents: &[Document<'_>],
    train: &Train<'_>,
    draft: &dyn Fn(&Fitted) -> Result<Draft, PairError>,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(FitOptions, Vec<WidthPoint>), FitError> {
    let with_width = |width: usize| FitOptions {
        mapper: MapperKind::Mlp(mlp::Settings { width, ..settings.clone() }),
        ..options.clone()
    };
    let (mut points, mut per_document) = (Vec::new(), Vec::new());
    for width in widths(settings.width) {
        let fitted = train(&with_width(width), watch)?;
        let (outcomes, handoff_ms) = attempt(tools, &draft(&fitted)?, documents)?;
        let n = outcomes.len() as f64;
        points.push(WidthPoint {
            width,
            mflops: fitted.flops() / 1e6,
            kl_nats: outcomes.iter().map(|quality| quality.kl_nats).sum::<f64>() / n,
            agreement: outcomes.iter().map(|quality| quality.agreement).sum::<f64>() / n,
            handoff_ms,
            documents: outcomes.len(),
        });
        per_document.push(outcomes.iter().map(|quality| -quality.kl_nats).collect());
    }
    Ok((with_width(points[smallest_as_good(&per_document)].width), points))
}

/// What is tried, ascending.
pub(super) fn widths(given: usize) -> Vec<usize> {
    let mut widths = vec![given.div_ceil(2), given, 2 * given];
    widths.dedup();
    widths
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_width_once() {
        assert_eq!(super::widths(48), [24, 48, 96]);
        assert_eq!(super::widths(1), [1, 2]);
    }
}
