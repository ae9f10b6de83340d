//! From captured rows to chosen ridge maps, timed: our side of `benches/fit_numpy`, whose README says what is counted.
//! `cargo run --example fit_speed -- ROWS OUT`; prints what it found as JSON, and writes the maps into OUT.
#![expect(clippy::print_stdout, reason = "an example prints what it measured")]

use std::{
    error::Error,
    fs::{self, File},
    io::{BufWriter, Read as _, Seek as _, SeekFrom, Write as _},
    path::Path,
    time::Instant,
};

use kvmig::{
    cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling},
    fit::{
        linalg::Matrix,
        moments::{MomentShape, Moments, Rows},
        ridge::{self, AffineMap, Lambda, LambdaConvention, LayerMap},
        rows::Extent,
        select::{self, Scores},
    },
};
use kvmig_gemm::{MatMut, MatRef, Threads, matmul};

/// Rows that a calibration sequence has: a fit adds one at a time to its moments.
const CHUNK: usize = 384;

const LAMBDA: Lambda = Lambda { value: 0.01, convention: LambdaConvention::Standardised };

type Fallible<T> = Result<T, Box<dyn Error>>;

fn main() -> Fallible<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, out] = arguments.as_slice() else {
        return Err("usage: fit_speed ROWS OUT".into());
    };
    let start = Instant::now();
    let mut captured = Captured::open(Path::new(folder))?;
    let moments = captured.moments()?;
    let summed = start.elapsed();
    let scores = Scores::new(&moments, &layout(captured.source.extent), &layout(captured.target.extent))?;
    let selected = start.elapsed();
    let held_out = captured.held_out()?;
    let mut r2 = Vec::new();
    for k in select::sweep(captured.source.extent.layers) {
        r2.push((k, held_out.r2(&ridge::fit(&moments, &scores.top_all(k), LAMBDA)?)?));
    }
    let chosen = r2.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1)).ok_or("nothing to choose from")?.0;
    let swept = start.elapsed();
    let maps = ridge::fit(&moments, &scores.top_all(chosen), LAMBDA)?;
    let solved = start.elapsed();

    let score = |target, source| scores.score(target, source);
    let table = |target| (0..captured.source.extent.layers).map(|source| score(target, source)).collect();
    let table: Vec<Vec<f64>> = (0..captured.target.extent.layers).map(table).collect();
    let seconds = serde_json::json!({
        "moments": summed.as_secs_f64(),
        "selection": (selected - summed).as_secs_f64(),
        "sweep": (swept - selected).as_secs_f64(),
        "solve": (solved - swept).as_secs_f64(),
        "total": solved.as_secs_f64(),
    });
    println!("{}", serde_json::json!({ "seconds": seconds, "scores": table, "r2": r2, "k": chosen }));
    fs::create_dir_all(out)?;
    for (layer, map) in maps.iter().enumerate() {
        for (part, map) in PARTS.into_iter().zip([&map.keys, &map.values]) {
            write(&Path::new(out).join(format!("{part}.{layer:02}.npy")), &map.weight)?;
        }
    }
    Ok(())
}

const PARTS: [char; 2] = ['k', 'v'];

/// What `rows.py` wrote.
#[derive(Debug)]
struct Captured {
    source: Side,
    target: Side,
    /// Rows to fit on, and behind them those to choose by.
    rows: usize,
    held_out: usize,
}

/// One model's rows: keys and values, a file for each layer.
#[derive(Debug)]
struct Side {
    extent: Extent,
    files: [Vec<Npy>; 2],
}

impl Captured {
    fn open(folder: &Path) -> Fallible<Captured> {
        let file = folder.join("shape.json");
        let bytes = fs::read(&file).map_err(|error| format!("{}: {error}: run rows.py first", file.display()))?;
        let shape: serde_json::Value = serde_json::from_slice(&bytes)?;
        let count = |name: &str| shape[name].as_u64().map(|n| n as usize).ok_or(format!("shape.json: no `{name}`"));
        let (rows, held_out) = (count("rows")?, count("held_out")?);
        let side = |name: &str| -> Fallible<Side> {
            let extent: Extent = serde_json::from_value(shape[name].clone())?;
            let open = |part, layer| {
                Npy::open(&folder.join(format!("{name}.{part}.{layer:02}.npy")), [rows + held_out, extent.width()])
            };
            let all = |part| (0..extent.layers).map(|layer| open(part, layer)).collect::<Fallible<Vec<_>>>();
            Ok(Side { extent, files: [all('k')?, all('v')?] })
        };
        Ok(Captured { source: side("source")?, target: side("target")?, rows, held_out })
    }

    fn moments(&mut self) -> Fallible<Moments> {
        let mut moments = Moments::new(MomentShape {
            source_layers: self.source.extent.layers,
            source_width: self.source.extent.width(),
            target_layers: self.target.extent.layers,
            target_width: self.target.extent.width(),
            hidden: 0,
        });
        for first in (0..self.rows).step_by(CHUNK) {
            let rows = CHUNK.min(self.rows - first);
            let [xk, xv] = [self.source.rows(0, first, rows)?, self.source.rows(1, first, rows)?];
            let [yk, yv] = [self.target.rows(0, first, rows)?, self.target.rows(1, first, rows)?];
            moments.add(Rows { source: &xk, target: &yk }, Rows { source: &xv, target: &yv });
        }
        Ok(moments)
    }

    fn held_out(&mut self) -> Fallible<HeldOut> {
        let (first, rows) = (self.rows, self.held_out);
        Ok(HeldOut { source: self.source.layers(first, rows)?, target: self.target.layers(first, rows)?, rows })
    }
}

impl Side {
    /// `[rows, layers · n_kv · d]`, as a fit captures them.
    fn rows(&mut self, part: usize, first: usize, rows: usize) -> Fallible<Vec<f32>> {
        let (width, columns) = (self.extent.width(), self.extent.layers * self.extent.width());
        let mut all = vec![0.0; rows * columns];
        for (layer, file) in self.files[part].iter_mut().enumerate() {
            let own = file.rows(first, rows)?;
            for (row, from) in all.chunks_exact_mut(columns).zip(own.chunks_exact(width)) {
                row[layer * width..(layer + 1) * width].copy_from_slice(from);
            }
        }
        Ok(all)
    }

    /// Keys and values of each layer by itself.
    fn layers(&mut self, first: usize, rows: usize) -> Fallible<[Vec<Vec<f32>>; 2]> {
        let [keys, values] = &mut self.files;
        let read =
            |files: &mut Vec<Npy>| files.iter_mut().map(|file| file.rows(first, rows)).collect::<Fallible<Vec<_>>>();
        Ok([read(keys)?, read(values)?])
    }
}

/// Rows that nothing is fitted on: keys and values of each layer, `[rows, n_kv · d]`.
#[derive(Debug)]
struct HeldOut {
    source: [Vec<Vec<f32>>; 2],
    target: [Vec<Vec<f32>>; 2],
    rows: usize,
}

impl HeldOut {
    /// Mean R² over target layers, keys and values.
    fn r2(&self, maps: &[LayerMap]) -> Fallible<f64> {
        let mut sum = 0.0;
        for (layer, map) in maps.iter().enumerate() {
            for (part, affine) in [&map.keys, &map.values].into_iter().enumerate() {
                let predicted = self.predict(part, &map.sources, affine)?;
                let target = &self.target[part][layer];
                let residual: f64 = target.iter().zip(&predicted).map(|(y, x)| f64::from(y - x).powi(2)).sum();
                sum += 1.0 - residual / spread(target, affine.bias.len());
            }
        }
        Ok(sum / (2 * maps.len()) as f64)
    }

    fn predict(&self, part: usize, sources: &[usize], map: &AffineMap) -> Fallible<Vec<f32>> {
        let (inputs, outputs) = (map.weight.rows(), map.weight.cols());
        let width = inputs / sources.len();
        let mut x = Vec::with_capacity(self.rows * inputs);
        for row in 0..self.rows {
            for &source in sources {
                x.extend_from_slice(&self.source[part][source][row * width..(row + 1) * width]);
            }
        }
        let weight: Vec<f32> = map.weight.as_slice().iter().map(|&w| w as f32).collect();
        let mut y = map.bias.iter().map(|&b| b as f32).collect::<Vec<_>>().repeat(self.rows);
        let (x, weight) = (MatRef::row_major(&x, self.rows, inputs)?, MatRef::row_major(&weight, inputs, outputs)?);
        matmul(MatMut::row_major(&mut y, self.rows, outputs)?, 1.0, 1.0, x, weight, Threads::All)?;
        Ok(y)
    }
}

/// Sum of squares about the column means.
fn spread(rows: &[f32], columns: usize) -> f64 {
    let count = (rows.len() / columns) as f64;
    let mut mean = vec![0.0; columns];
    for row in rows.chunks_exact(columns) {
        mean.iter_mut().zip(row).for_each(|(mean, &y)| *mean += f64::from(y) / count);
    }
    let of_row = |row: &[f32]| row.iter().zip(&mean).map(|(&y, mean)| (f64::from(y) - mean).powi(2)).sum::<f64>();
    rows.chunks_exact(columns).map(of_row).sum()
}

/// A matrix of f32 as `numpy.save` writes it, version 1.0.
#[derive(Debug)]
struct Npy {
    file: File,
    payload: u64,
    columns: usize,
}

impl Npy {
    fn open(path: &Path, [rows, columns]: [usize; 2]) -> Fallible<Npy> {
        let mut file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut head = [0; 10];
        file.read_exact(&mut head)?;
        let mut description = vec![0; usize::from(u16::from_le_bytes([head[8], head[9]]))];
        file.read_exact(&mut description)?;
        let description = String::from_utf8_lossy(&description);
        let expected = ["'descr': '<f4'", "'fortran_order': False", &format!("'shape': ({rows}, {columns})")];
        match expected.iter().find(|part| !description.contains(**part)) {
            Some(part) => Err(format!("{}: found {description}, expected {part}", path.display()).into()),
            None => Ok(Npy { file, payload: (head.len() + description.len()) as u64, columns }),
        }
    }

    fn rows(&mut self, first: usize, rows: usize) -> Fallible<Vec<f32>> {
        let mut bytes = vec![0; 4 * rows * self.columns];
        self.file.seek(SeekFrom::Start(self.payload + (4 * first * self.columns) as u64))?;
        self.file.read_exact(&mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect())
    }
}

/// A matrix of f64 as `numpy.load` reads it.
fn write(path: &Path, matrix: &Matrix) -> Fallible<()> {
    let shape = format!("'shape': ({}, {})", matrix.rows(), matrix.cols());
    // The header ends on a multiple of 64 bytes.
    let description = format!("{:<117}\n", format!("{{'descr': '<f8', 'fortran_order': False, {shape}, }}"));
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(b"\x93NUMPY\x01\x00")?;
    file.write_all(&(description.len() as u16).to_le_bytes())?;
    file.write_all(description.as_bytes())?;
    for x in matrix.as_slice() {
        file.write_all(&x.to_le_bytes())?;
    }
    Ok(file.flush()?)
}

/// A layout of these layers and heads; its rotation is of no matter here.
fn layout(extent: Extent) -> CacheLayout {
    let rope = Rope { theta: 1e6, dims: extent.head_dim, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
    let Extent { layers, kv_heads, head_dim } = extent;
    CacheLayout { layers, kv_heads, head_dim, rope, elem: Elem::F32 }
}
