//! Each lint finds what its page says breaks it, and the kernels are free of findings; reflection of foreign modules.

use kvmig_shaders::{
    Access, Element, lint,
    reflect::{Features, Parsed, ShaderError, Space},
    table::SHADERS,
};

fn parse(source: &str) -> Parsed {
    Parsed::new("test", source, Features::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// Names of the lints that object, with the line.
fn findings(source: &str) -> Vec<(&'static str, Option<u32>)> {
    lint::run(&parse(source)).iter().map(|f| (f.lint, f.line)).collect()
}

/// A kernel with the loop given.
fn with_loop(code: &str) -> String {
    format!(
        "struct P {{ n: u32, m: u32 }}
         @group(0) @binding(0) var<uniform> p: P;
         @group(0) @binding(1) var<storage, read> input: array<u32>;
         @group(0) @binding(2) var<storage, read_write> output: array<u32>;
         @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
{code}
         }}"
    )
}

#[test]
fn kernels_are_free_of_findings() {
    for shader in SHADERS {
        let parsed = Parsed::new(shader.name, shader.source, Features { f16: shader.f16 }).unwrap();
        assert_eq!(lint::run(&parsed), [], "{}", shader.name);
    }
}

#[test]
fn counted_loops_pass() {
    for code in [
        "for (var i = 0u; i < p.n; i++) { output[i] = input[i]; }",
        "for (var i = id.x; i < arrayLength(&input); i += 64u) { output[i] = 1u; }",
        "for (var i = p.n; i > 0u; i -= 1u) { output[i] = 1u; }",
        "let n = min(p.n, input[0]) * 2u; var i = 0u; while i < n { if input[i] == 3u { break; } i += 1u; }",
        "for (var i = 0u; i < p.n; i++) { for (var j = i; j < p.m; j++) { output[j] += 1u; } }",
        "for (var i = 0u; i < p.n; i++) { if input[i] == 0u { continue; } output[i] = 1u; }",
        "var i = 0u; loop { output[i] = 1u; continuing { i += 1u; break if i >= p.n; } }",
    ] {
        assert_eq!(findings(&with_loop(code)), [], "{code}");
    }
}

#[test]
fn loops_that_data_decides_are_found() {
    for code in [
        "loop { if output[0] == 1u { break; } }",
        "for (var i = 0u; i < output[1]; i++) { output[i] = 1u; }",
        "for (var i = 1u; i < p.n; i *= 2u) { output[i] = 1u; }",
        "for (var i = 0u; i < p.n; i += input[i]) { output[i] = 1u; }",
        "for (var i = 0u; i < p.n; i += 0u) { output[i] = 1u; }",
        "for (var i = 0u; i < p.n; i++) { i = input[i]; }",
        "var n = p.n; for (var i = 0u; i < n; i++) { n += 1u; }",
        "for (var i = 0u; i != p.n; i += 2u) { output[i] = 1u; }",
        "var i = 0u; loop { if input[i] == 0u { continue; } if i >= p.n { break; } i += 1u; }",
        "for (var i = 0u; i < p.n; i++) { for (var j = 0u; j < p.m; j++) { i = j; } }",
    ] {
        assert_eq!(findings(&with_loop(code)), [("bounded_loops", Some(6))], "{code}");
    }
}

#[test]
fn float_equality_is_found() {
    let code = "let x = bitcast<f32>(input[0]); if x != x { output[0] = 1u; }";
    assert_eq!(findings(&with_loop(code)), [("float_equality", Some(6))]);
    let code = "let x = vec2<f32>(1.0, bitcast<f32>(input[0])); if all(x == vec2<f32>(0.0)) { output[0] = 1u; }";
    assert_eq!(findings(&with_loop(code)), [("float_equality", Some(6))]);
    let code = "let x = bitcast<f32>(input[0]); if x < 1.0 || input[1] == 3u { output[0] = 1u; }";
    assert_eq!(findings(&with_loop(code)), []);
}

/// A kernel of 64 invocations with shared memory and the code given.
fn with_tile(code: &str) -> String {
    format!(
        "struct P {{ n: u32, m: u32 }}
         @group(0) @binding(0) var<uniform> p: P;
         @group(0) @binding(2) var<storage, read_write> output: array<u32>;
         var<workgroup> tile: array<u32, 64>;
         fn sync(x: u32) {{ tile[x] = x; workgroupBarrier(); }}
         @compute @workgroup_size(64) fn main(@builtin(local_invocation_id) id: vec3<u32>, @builtin(workgroup_id) w: vec3<u32>) {{
{code}
         }}"
    )
}

#[test]
fn barriers_that_all_reach_pass() {
    for code in [
        "tile[id.x] = 1u; workgroupBarrier(); output[id.x] = tile[0];",
        "for (var i = 0u; i < p.n; i++) { tile[id.x] = i; workgroupBarrier(); output[id.x] += tile[0]; workgroupBarrier(); }",
        "if w.x < p.n { workgroupBarrier(); }",
        "if id.x < p.n { output[id.x] = 1u; } workgroupBarrier();",
        "if p.n == 0u { return; } sync(id.x);",
        "for (var i = id.x; i < p.n; i += 64u) { output[i] = 1u; } workgroupBarrier();",
        "let n = workgroupUniformLoad(&tile[0]); if n > 1u { workgroupBarrier(); }",
    ] {
        assert_eq!(findings(&with_tile(code)), [], "{code}");
    }
}

#[test]
fn barriers_that_some_miss_are_found() {
    for code in [
        "if id.x < p.n { workgroupBarrier(); }",
        "if id.x >= p.n { return; } workgroupBarrier();",
        "for (var i = id.x; i < p.n; i += 64u) { workgroupBarrier(); }",
        "for (var i = 0u; i < p.n; i++) { if id.x == i { break; } workgroupBarrier(); }",
        "var x = p.n; if id.x == 3u { x = 0u; } if x > 1u { workgroupBarrier(); }",
        "var x = 0u; for (var i = 0u; i < p.n; i++) { if x > 1u { workgroupBarrier(); } x = id.x; }",
        "if output[0] == 1u { workgroupBarrier(); }",
        "if tile[0] == 1u { sync(id.x); }",
        "switch id.x { case 0u: { workgroupBarrier(); } default: {} }",
    ] {
        assert_eq!(findings(&with_tile(code)), [("uniform_barriers", Some(7))], "{code}");
    }
}

#[test]
fn what_not_every_adapter_has_is_found() {
    let floor = ("common_floor", None);
    assert_eq!(findings("@compute @workgroup_size(32, 16) fn main() {}"), [floor]);
    assert_eq!(findings("@compute @workgroup_size(1) fn a() {} @compute @workgroup_size(1) fn b() {}"), [floor]);
    assert_eq!(findings("fn helper() {}"), [floor]);
    let declared: String =
        (0..9).map(|i| format!("@group(0) @binding({i}) var<storage, read_write> b{i}: array<u32>;\n")).collect();
    let used: String = (0..9).map(|i| format!("b{i}[0] = 1u; ")).collect();
    assert_eq!(findings(&format!("{declared} @compute @workgroup_size(1) fn main() {{ {used} }}")), [floor]);
    assert_eq!(
        findings(
            "@group(1) @binding(0) var<storage, read_write> x: array<u32>;
             @compute @workgroup_size(1) fn main() { x[0] = 1u; }"
        ),
        [floor]
    );
    assert_eq!(
        findings("var<workgroup> x: array<u32, 8192>; @compute @workgroup_size(1) fn main() { x[0] = 1u; }"),
        [floor]
    );
}

#[test]
fn reflection_reads_what_the_code_does() {
    let parsed = parse(&with_loop("output[id.x] = input[id.x] + p.n;"));
    let [entry] = parsed.entries() else { panic!("one entry point") };
    assert_eq!((entry.name.as_str(), entry.workgroup_size), ("main", [64, 1, 1]));
    let seen: Vec<_> = entry.bindings.iter().map(|b| (b.index, b.space, b.access, b.element, b.min_bytes)).collect();
    assert_eq!(
        seen,
        [
            (0, Space::Uniform, Access::Read, Element::Block, 8),
            (1, Space::Storage, Access::Read, Element::U32, 4),
            (2, Space::Storage, Access::Write, Element::U32, 4),
        ]
    );
    let parsed = parse(&with_loop("output[id.x] += 1u;"));
    assert_eq!(parsed.entries()[0].bindings[0].access, Access::ReadWrite);
    assert_eq!(parsed.structs()[0].members, [("n".to_owned(), 0), ("m".to_owned(), 4)]);
}

#[test]
fn errors_point_into_the_source() {
    let error = |source: &str| Parsed::new("mine.wgsl", source, Features::default()).unwrap_err();
    let parse = error("@compute @workgroup_size(1)\nfn main() { let x = y; }");
    assert!(matches!(parse, ShaderError::Parse { .. }));
    assert!(parse.to_string().contains("mine.wgsl:2:21"), "{parse}");
    let f16 = error("enable f16;\n@compute @workgroup_size(1)\nfn main() { var x = 1.0h; }");
    assert!(f16.to_string().starts_with("shader mine.wgsl"), "{f16}");
    let stored = error(
        "@group(0) @binding(0) var<storage, read> x: array<u32>;
         @compute @workgroup_size(1) fn main() { x[0] = 1u; }",
    );
    assert!(matches!(stored, ShaderError::Validate { .. }), "{stored}");
    assert!(stored.to_string().contains("mine.wgsl:2:"), "{stored}");
    assert!(matches!(error("@fragment fn main() {}"), ShaderError::Stage { .. }));
    assert!(matches!(
        error("override n: u32; @compute @workgroup_size(n) fn main() {}"),
        ShaderError::OverriddenSize { .. }
    ));
    let texture = error(
        "@group(0) @binding(0) var t: texture_2d<f32>;
         @compute @workgroup_size(1) fn main() { let d = textureDimensions(t); }",
    );
    assert!(matches!(texture, ShaderError::Resource { .. }), "{texture}");
}
