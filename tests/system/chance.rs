//! Random choices that can be made again: `WEFT_SEED` repeats a run, `WEFT_ROUNDS` sets its length.

pub(crate) struct Chance(fastrand::Rng);

impl Chance {
    /// Prints the seed that it starts from.
    pub(crate) fn new() -> Self {
        let seed = number("WEFT_SEED").unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(0, |since| since.as_nanos() as u64)
        });
        eprintln!("to make the same choices again: WEFT_SEED={seed}");
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Another one, for something that goes on beside.
    pub(crate) fn split(&mut self) -> Self {
        Self(self.0.fork())
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0.usize(..bound)
    }

    pub(crate) fn pick<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        &among[self.below(among.len())]
    }

    /// True so many times in a hundred.
    pub(crate) fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// Number of rounds for a test that is the better the more rounds it has.
pub(crate) fn rounds(usual: usize) -> usize {
    number("WEFT_ROUNDS").map_or(usual, |rounds| rounds as usize)
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, expected a number")))
}
