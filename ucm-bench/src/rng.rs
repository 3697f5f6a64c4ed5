//! Random numbers that can be repeated.
//!
//! Owns: one small seeded generator (SplitMix64) and two distributions.
//! **Invariant:** the same seed gives the same numbers on every machine and in every version.

/// A seeded generator. Not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 when `bound` is 0. (The bias, below 2⁻³², does not matter here.)
    pub fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.bits()) * u128::from(bound);
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// Uniform in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `exp` of a normal variable with this mean and deviation.
    pub fn log_normal(&mut self, mean: f64, deviation: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.unit()).cos();
        (mean + deviation * normal).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn known_numbers_of_splitmix64() {
        let mut rng = Rng::new(1_234_567);
        let first = [rng.bits(), rng.bits(), rng.bits()];
        assert_eq!(first, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn ranges_hold_and_the_median_is_right() {
        let mut rng = Rng::new(7);
        assert!((0..1000).all(|_| rng.below(10) < 10 && (0.0..1.0).contains(&rng.unit())));
        assert_eq!(rng.below(0), 0);
        let mut numbers: Vec<f64> = (0..9999).map(|_| rng.log_normal(2.0, 1.0)).collect();
        numbers.sort_by(f64::total_cmp);
        let expected = 2.0_f64.exp();
        assert!((numbers[4999] / expected - 1.0).abs() < 0.05, "{}", numbers[4999]);
    }
}
