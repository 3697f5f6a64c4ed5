//! One measured quantity.
//!
//! Owns: the samples and what is said about them.
//! **Invariant:** min ≤ median ≤ max, and all samples are kept in the order they were taken.

/// The samples of one quantity, one for each run. The unit is part of the field's name.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    samples: Vec<f64>,
    sorted: Vec<f64>,
}

impl Figure {
    /// From one value for each run; `None` without any, or if one is not finite.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let samples: Vec<f64> = samples.into_iter().collect();
        if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
            return None;
        }
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        Some(Self { samples, sorted })
    }

    /// The middle sample, or the mean of the two middle ones.
    pub fn median(&self) -> f64 {
        let half = self.sorted.len() / 2;
        let upper = self.at(half);
        if self.sorted.len() % 2 == 1 { upper } else { f64::midpoint(self.at(half - 1), upper) }
    }

    /// The smallest sample.
    pub fn min(&self) -> f64 {
        self.at(0)
    }

    /// The largest sample.
    pub fn max(&self) -> f64 {
        self.at(self.sorted.len() - 1)
    }

    /// All samples, in the order they were taken.
    pub fn samples(&self) -> &[f64] {
        &self.samples
    }

    /// Run by run this figure divided by `floor`, which was measured in the same runs. `None` when
    /// the numbers of runs differ or a floor is zero.
    pub fn ratio_to(&self, floor: &Self) -> Option<Self> {
        if self.samples.len() != floor.samples.len() {
            return None;
        }
        Self::of(self.samples.iter().zip(&floor.samples).map(|(value, floor)| value / floor))
    }

    fn at(&self, index: usize) -> f64 {
        self.sorted.get(index).copied().unwrap_or(f64::NAN)
    }
}

#[cfg(test)]
mod tests {
    use super::Figure;

    #[test]
    fn median_min_max_and_order() {
        let odd = Figure::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median(), odd.min(), odd.max()), (2.0, 1.0, 3.0));
        assert_eq!(odd.samples(), [3.0, 1.0, 2.0]);
        let even = Figure::of([4.0, 1.0, 2.0, 8.0]).unwrap();
        assert_eq!(even.median(), 3.0);
    }

    #[test]
    fn no_samples_and_no_numbers_are_no_figure() {
        assert_eq!(Figure::of([]), None);
        assert_eq!(Figure::of([1.0, f64::NAN]), None);
        assert_eq!(Figure::of([f64::INFINITY]), None);
    }

    #[test]
    fn ratios_are_taken_run_by_run() {
        let value = Figure::of([2.0, 9.0]).unwrap();
        let floor = Figure::of([1.0, 3.0]).unwrap();
        assert_eq!(value.ratio_to(&floor).unwrap().samples(), [2.0, 3.0]);
        assert_eq!(value.ratio_to(&Figure::of([1.0]).unwrap()), None);
        assert_eq!(value.ratio_to(&Figure::of([1.0, 0.0]).unwrap()), None);
    }
}
