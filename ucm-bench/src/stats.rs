//! Is a difference more than noise?
//!
//! Owns: the rank-sum (Mann-Whitney) test, and percentiles.
//! **Invariant:** the p-value is exact for small samples: it counts arrangements, it does not
//! assume a distribution.

/// Up to this many arrangements are counted one by one.
const EXACT_UP_TO: u64 = 200_000;

/// Two-sided p-value of the rank-sum test: how probable a difference of ranks at least this large
/// would be if both samples came from one distribution. 1.0 when a sample is empty. Ties get mean
/// ranks. With 5 values on each side the smallest possible value is 2/252 ≈ 0.008.
pub fn rank_sum_p(first: &[f64], second: &[f64]) -> f64 {
    if first.is_empty() || second.is_empty() {
        return 1.0;
    }
    let ranks = mean_ranks(first, second);
    let observed: f64 = ranks.iter().take(first.len()).sum();
    let expected = first.len() as f64 * (ranks.len() as f64 + 1.0) / 2.0;
    let distance = (observed - expected).abs();
    if arrangements(ranks.len(), first.len()) <= EXACT_UP_TO {
        exact(&ranks, first.len(), expected, distance)
    } else {
        normal(&ranks, first.len(), distance)
    }
}

/// The value that `share` (0 to 1) of the sorted samples do not exceed; 0 without samples.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into the samples"
    )]
    let index = ((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(0.0)
}

fn mean_ranks(first: &[f64], second: &[f64]) -> Vec<f64> {
    let all: Vec<f64> = first.iter().chain(second).copied().collect();
    let rank = |value: &f64| {
        let below = all.iter().filter(|other| *other < value).count() as f64;
        let same = all.iter().filter(|other| *other == value).count() as f64;
        below + f64::midpoint(same, 1.0)
    };
    all.iter().map(rank).collect()
}

/// n over k, saturating.
fn arrangements(n: usize, k: usize) -> u64 {
    let k = k.min(n - k);
    (0..k as u64).fold(1_u64, |product, i| product.saturating_mul(n as u64 - i) / (i + 1))
}

fn exact(ranks: &[f64], k: usize, expected: f64, distance: f64) -> f64 {
    let (mut total, mut extreme) = (0_u64, 0_u64);
    choose(ranks, k, 0.0, &mut |sum| {
        total += 1;
        if (sum - expected).abs() >= distance - 1e-9 {
            extreme += 1;
        }
    });
    extreme as f64 / total as f64
}

/// Calls `each` with the sum of every choice of `k` ranks.
fn choose(ranks: &[f64], k: usize, sum: f64, each: &mut impl FnMut(f64)) {
    match ranks.split_first() {
        _ if k == 0 => each(sum),
        Some((rank, rest)) if rest.len() + 1 >= k => {
            choose(rest, k - 1, sum + rank, each);
            choose(rest, k, sum, each);
        }
        _ => {}
    }
}

/// Normal approximation; the variance of the actual ranks accounts for ties.
fn normal(ranks: &[f64], k: usize, distance: f64) -> f64 {
    let n = ranks.len() as f64;
    let mean = (n + 1.0) / 2.0;
    let spread: f64 = ranks.iter().map(|rank| (rank - mean).powi(2)).sum();
    let variance = k as f64 * (n - k as f64) / (n * (n - 1.0)) * spread;
    if variance <= 0.0 {
        return 1.0;
    }
    (2.0 * upper_tail((distance - 0.5).max(0.0) / variance.sqrt())).min(1.0)
}

/// P(Z > z) of the standard normal distribution for z ≥ 0 (Abramowitz and Stegun 26.2.17, error
/// below 10⁻⁷).
fn upper_tail(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let factors = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let polynomial = factors.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt() * polynomial
}

#[cfg(test)]
mod tests {
    use super::{exact, mean_ranks, normal, rank_sum_p, upper_tail};

    #[test]
    fn separated_samples_have_the_smallest_p() {
        let low = [1.0, 2.0, 3.0, 4.0, 5.0];
        let high = [6.0, 7.0, 8.0, 9.0, 10.0];
        assert!((rank_sum_p(&low, &high) - 2.0 / 252.0).abs() < 1e-12);
        assert_eq!(rank_sum_p(&low, &high), rank_sum_p(&high, &low));
        let near = [1.5, 2.5, 3.5, 4.5, 5.5];
        assert!(rank_sum_p(&low, &near) > 0.5);
    }

    #[test]
    fn equal_and_empty_samples_say_nothing() {
        assert_eq!(rank_sum_p(&[1.0; 5], &[1.0; 5]), 1.0);
        assert_eq!(rank_sum_p(&[], &[1.0]), 1.0);
        assert_eq!(rank_sum_p(&[1.0], &[2.0]), 1.0);
    }

    #[test]
    fn ties_get_mean_ranks() {
        assert_eq!(mean_ranks(&[1.0, 2.0], &[2.0, 3.0]), [1.0, 2.5, 2.5, 4.0]);
    }

    #[test]
    fn approximation_agrees_with_counting() {
        let first: Vec<f64> = (0..8).map(f64::from).collect();
        let second: Vec<f64> = (0..8).map(|i| f64::from(i) + 3.5).collect();
        let ranks = mean_ranks(&first, &second);
        let observed: f64 = ranks.iter().take(8).sum();
        let expected = 8.0 * 17.0 / 2.0;
        let distance = (observed - expected).abs();
        let counted = exact(&ranks, 8, expected, distance);
        assert!((counted - normal(&ranks, 8, distance)).abs() < 0.01);
        assert!((upper_tail(1.959_964) - 0.025).abs() < 1e-6);
        let many: Vec<f64> = (0..30).map(f64::from).collect();
        let shifted: Vec<f64> = many.iter().map(|x| x + 40.0).collect();
        assert!(rank_sum_p(&many, &shifted) < 1e-6);
    }
}
