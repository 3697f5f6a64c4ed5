//! `net`: its fields, and that what was read is right, for every engine.

use serde_json::Value;

use crate::{bench, text};

#[test]
fn both_engines_read_the_right_bytes_and_report_all_fields() {
    for engine in ["tcp", "shm"] {
        let cases = ["--case", "4096,61x1728,1000/5000,1500000", "--case-ms", "5", "--runs", "2"];
        let args = [&["net", "--json", "--quiet", "--engine", engine][..], &cases].concat();
        let output = bench(&args);
        assert!(output.status.success(), "{}", text(&output));
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let results = &document["results"];
        assert_eq!(results["wrong_bytes"], 0);
        assert_eq!(document["env"]["engine"], engine);
        let cases = results["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 4);
        for case in cases {
            for field in ["p50_us", "p99_us", "floor_us", "ratio", "ns_per_fragment"] {
                assert!(case[field].as_f64().is_some_and(|v| v > 0.0), "{field}: {case:#}");
            }
        }
        assert!(results["ratio_61x1728"].as_f64().is_some());
        assert!(results["ratio_1000_of_5000"].as_f64().is_some());
    }
}

/// Where there is an adapter `cargo xtask rdma-vm` lets it run.
#[test]
fn without_an_adapter_it_says_what_is_missing() {
    if std::path::Path::new("/sys/class/infiniband").exists() {
        println!("SKIP there may be an RDMA adapter here");
        return;
    }
    let output = bench(&["net", "--engine", "rdma", "--case", "4096", "--case-ms", "5"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    assert!(
        text(&output).contains("install") || text(&output).contains("driver"),
        "{}",
        text(&output)
    );
}

#[test]
fn shapes_that_make_no_sense_are_refused() {
    for case in ["0", "5x", "9/3"] {
        let output = bench(&["net", "--case", case]);
        assert_eq!(output.status.code(), Some(2), "{case}");
    }
}
