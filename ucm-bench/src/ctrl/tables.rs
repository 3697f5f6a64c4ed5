//! Hits, lookups and floors in tables that one process has for itself.
//!
//! Owns: the tables, the random orders, the passes.
//! **Invariant:** passes over the cache and over the floor take turns, so that both see the same
//! machine; every answer of the cache is checked.

use ucm_ctrl::{
    Acquired, Control, Geometry, Key, MemberSpec, Pool, PoolId, Presence,
    testing::{LineFloor, Place},
};

use super::{
    peer,
    spec::{Size, Speeds, key},
};
use crate::{clock, error::BenchError, figure::Figure, rng::Rng};

/// Operations of one pass: so few that most passes end before the scheduler interrupts them.
pub(crate) const PASS: usize = 1 << 12;
/// Least and most keys that are visited in all; more do not fit into any processor's cache either.
const VISITED: [usize; 2] = [1 << 16, 1 << 20];
/// Passes of each kind in one run; the median counts.
const PASSES: usize = 128;
/// Kinds of passes.
const KINDS: usize = 6;
/// Keys of one lookup.
const BATCH: usize = 1024;

/// A full table and an equally large one for the floors.
#[derive(Debug)]
pub(crate) struct Tables {
    size: Size,
    pool: Pool,
    bytes: u64,
    keys: Vec<Key>,
    floor: LineFloor,
    places: Vec<Place>,
}

impl Tables {
    pub(crate) fn make(size: Size) -> Result<Self, BenchError> {
        let geometry = Geometry::single(size.slots, 0, 1, 1);
        let control = Control::create(&geometry, [1; 16]).map_err(peer)?;
        let bytes = control.total_bytes() as u64;
        let pool = control
            .join(MemberSpec::rank(0, 1))
            .and_then(|member| member.pool(PoolId(0)))
            .map_err(peer)?;
        fill(&pool, size.keys)?;
        let other = Control::create(&geometry, [2; 16]).map_err(peer)?;
        let floor = LineFloor::new(other, PoolId(0)).map_err(peer)?;
        let mut rng = Rng::new(3);
        let keys: Vec<Key> = random_order(size.keys, &mut rng).map(key).collect();
        let place = |_: &Key| {
            let bits = rng.bits().to_le_bytes();
            let [a, b, c, d, e, f, g, h] = bits;
            floor.place([u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])])
        };
        let places: Vec<Place> = keys.iter().map(place).collect();
        // Maps the pages.
        floor.read(&places);
        Ok(Self { size, pool, bytes, keys, floor, places })
    }

    pub(crate) fn size(&self) -> Size {
        self.size
    }

    /// Bytes of shared memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// One run.
    pub(crate) fn measure(&self, seed: u64) -> Result<Speeds, BenchError> {
        let floor = |pass: &dyn Fn(&[Place]), places: &[Place]| {
            timed(|| {
                pass(places);
                Ok(())
            })
        };
        let mut samples: [Vec<f64>; KINDS] = Default::default();
        let first = usize::try_from(seed).unwrap_or(0).wrapping_mul(PASSES);
        for number in (0..PASSES).map(|number| first.wrapping_add(number)) {
            let results = [
                timed(|| hits(&self.pool, part(&self.keys, number, 0)))?,
                floor(&|places| self.floor.read(places), part(&self.places, number, 1))?,
                timed(|| lookups(&self.pool, part(&self.keys, number, 2)))?,
                floor(&|places| self.floor.chase(places), part(&self.places, number, 3))?,
                timed(|| prefixes(&self.pool, part(&self.keys, number, 4)))?,
                floor(&|places| self.floor.pin(places), part(&self.places, number, 5))?,
            ];
            for (samples, result) in samples.iter_mut().zip(results) {
                samples.push(result);
            }
        }
        let [hit, read, lookup, chase, prefix, pin] = &samples;
        let over = |floor: &[f64]| median(hit.iter().zip(floor).map(|(hit, floor)| hit - floor));
        Ok(Speeds {
            hit_ns: median(hit.iter().copied()),
            lookup_ns: median(lookup.iter().copied()),
            prefix_ns: median(prefix.iter().copied()),
            read_floor_ns: median(read.iter().copied()),
            chase_floor_ns: median(chase.iter().copied()),
            pin_floor_ns: median(pin.iter().copied()),
            over_read_ns: over(read),
            over_chase_ns: over(chase),
        })
    }
}

fn median(samples: impl Iterator<Item = f64>) -> f64 {
    Figure::of(samples).map_or(f64::NAN, |figure| figure.median())
}

/// Makes keys 0 to `count` resident.
pub(crate) fn fill(pool: &Pool, count: u32) -> Result<(), BenchError> {
    for number in 0..u64::from(count) {
        match pool.acquire(&key(number)).map_err(peer)? {
            Acquired::Owner(fill) => drop(fill.publish().map_err(|e| peer(format!("{e:?}")))?),
            other => return Err(peer(format!("key {number} of {count} is not new: {other:?}"))),
        }
    }
    Ok(())
}

/// Whole passes of numbers below `count`, each about equally often, in random order.
pub(crate) fn random_order(count: u32, rng: &mut Rng) -> impl Iterator<Item = u64> + use<> {
    let mut numbers: Vec<u32> = (0..count).collect();
    let [least, most] = VISITED;
    let visited = numbers.len().min(most);
    let wanted = visited.max(least) / PASS * PASS;
    let mut order = Vec::with_capacity(wanted + visited);
    while order.len() < wanted {
        for at in 0..visited {
            let left = (numbers.len() - at) as u64;
            let other = at + usize::try_from(rng.below(left)).unwrap_or(0);
            numbers.swap(at, other);
        }
        order.extend(numbers.iter().take(visited).map(|number| u64::from(*number)));
    }
    order.truncate(wanted);
    order.into_iter()
}

/// What pass `number` of a kind visits. Each kind is elsewhere, so that none finds in the
/// processor's cache what another has just read.
fn part<T>(list: &[T], number: usize, kind: usize) -> &[T] {
    let parts = list.len() / PASS;
    let at = (number % parts + kind * parts / KINDS) % parts;
    list.chunks_exact(PASS).nth(at).unwrap_or(&[])
}

/// Nanoseconds per operation of one pass.
pub(crate) fn timed(pass: impl FnOnce() -> Result<(), BenchError>) -> Result<f64, BenchError> {
    let start = clock::now_ns();
    pass()?;
    Ok((clock::now_ns() - start) as f64 / PASS as f64)
}

/// Acquires and releases each key.
pub(crate) fn hits(pool: &Pool, keys: &[Key]) -> Result<(), BenchError> {
    for key in keys {
        match pool.acquire(key) {
            Ok(Acquired::Hit(pin)) => drop(pin),
            other => return Err(peer(format!("{key:?} is not resident: {other:?}"))),
        }
    }
    Ok(())
}

fn lookups(pool: &Pool, keys: &[Key]) -> Result<(), BenchError> {
    let mut answers = [Presence::Absent; BATCH];
    for batch in keys.chunks(BATCH) {
        pool.lookup(batch, &mut answers).map_err(peer)?;
        if answers.iter().take(batch.len()).any(|answer| *answer != Presence::Ready) {
            return Err(peer("a lookup missed a resident key"));
        }
    }
    Ok(())
}

fn prefixes(pool: &Pool, keys: &[Key]) -> Result<(), BenchError> {
    for batch in keys.chunks(BATCH) {
        let ready = pool.prefix_lookup(batch).map_err(peer)?;
        if ready != batch.len() {
            return Err(peer(format!("{ready} of {} resident keys were found", batch.len())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{KINDS, PASS, Tables, VISITED, part, random_order};
    use crate::{ctrl::spec::Size, rng::Rng};

    #[test]
    fn orders_visit_everything_and_fill_whole_passes() {
        for count in [1_u32, 1000, 70_000, 300_000] {
            let order: Vec<u64> = random_order(count, &mut Rng::new(1)).collect();
            assert!(
                order.len() >= PASS && order.len().is_multiple_of(PASS),
                "{count}: {}",
                order.len()
            );
            let mut seen = vec![0_usize; count as usize];
            for number in &order {
                seen[usize::try_from(*number).unwrap()] += 1;
            }
            let most = order.len().div_ceil(seen.len());
            assert!(seen.iter().all(|times| *times <= most + 1), "{count}");
            let missed = seen.iter().filter(|times| **times == 0).count();
            assert!(missed < PASS, "{count}: {missed} are never visited");
        }
        assert_eq!(random_order(3_000_000, &mut Rng::new(1)).count(), VISITED[1]);
    }

    #[test]
    fn kinds_of_passes_keep_away_from_each_other() {
        let list: Vec<usize> = (0..PASS * 16).collect();
        for number in 0..100 {
            let mut first: Vec<usize> = (0..KINDS).map(|k| part(&list, number, k)[0]).collect();
            assert!(first.iter().all(|at| at.is_multiple_of(PASS)));
            first.sort_unstable();
            first.dedup();
            assert_eq!(first.len(), KINDS);
        }
        let all: std::collections::HashSet<usize> =
            (0..16).flat_map(|number| part(&list, number, 3)).copied().collect();
        assert_eq!(all.len(), list.len());
    }

    #[test]
    fn every_measured_speed_is_a_positive_number() {
        let tables = Tables::make(Size { slots: 1000, keys: 900 }).unwrap();
        let speeds = tables.measure(1).unwrap();
        for value in [speeds.hit_ns, speeds.lookup_ns, speeds.prefix_ns, speeds.read_floor_ns] {
            assert!(value > 0.0 && value.is_finite(), "{speeds:?}");
        }
        assert!(tables.bytes() > 1000 * 64);
    }
}
