//! Batches of messages, sealed and opened by each implementation.

use aead::{BATCH, Implementation, Key, Message, TAG, nonce};

use crate::input::Input;

/// The first bytes are the key; then each message has a counter, a length, what to do to it, and a byte
/// that fills it. All implementations make of a batch what ring does, and nothing around it changes.
#[test]
fn aead() {
    bolero::check!().with_max_len(512).for_each(|bytes: &[u8]| {
        let mut input = Input::new(bytes);
        let key = std::array::from_fn(|_| input.byte());
        let mut cases = Vec::new();
        while !input.is_empty() && cases.len() < BATCH {
            cases.push(Case::read(&mut input));
        }
        let keys = Implementation::ALL.into_iter().filter_map(|one| Key::with(one, &key));
        let outcomes: Vec<_> = keys.map(|key| run(&key, &cases)).collect();
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
    });
}

struct Case {
    counter: u64,
    text: Vec<u8>,
    gap: usize,
    /// Bit that is changed before it is opened.
    damage: Option<usize>,
}

impl Case {
    fn read(input: &mut Input<'_>) -> Self {
        let counter = std::array::from_fn(|_| input.byte());
        let (len, kind, fill) = (usize::from(input.word()) % 1601, input.byte(), input.byte());
        let text = (0..len).map(|i| fill ^ (i * usize::from(kind & 1)) as u8).collect();
        let damage = (kind & 2 != 0).then(|| usize::from(input.word()) % (8 * (len + TAG)));
        Self { counter: u64::from_be_bytes(counter), text, gap: usize::from(kind >> 2), damage }
    }
}

/// Buffer after sealing and after opening, and which messages were opened.
fn run(key: &Key, cases: &[Case]) -> (Vec<u8>, Vec<u8>, u32) {
    let mut buffer = Vec::new();
    for case in cases {
        buffer.resize(buffer.len() + case.gap, 0xa5);
        buffer.extend(&case.text);
        buffer.resize(buffer.len() + TAG, 0);
    }
    buffer.resize(buffer.len() + 64, 0xa5);
    key.seal_batch(&mut messages(&mut buffer, cases));
    let sealed = buffer.clone();
    let mut batch = messages(&mut buffer, cases);
    let mut damaged = 0;
    for (i, (message, case)) in batch.iter_mut().zip(cases).enumerate() {
        if let Some(bit) = case.damage {
            message.bytes[bit / 8] ^= 1 << (bit % 8);
            damaged |= 1 << i;
        }
    }
    let opened = key.open_batch(&mut batch);
    assert_eq!(opened, ((1 << cases.len()) - 1) & !damaged);
    // ring leaves zeros, others the ciphertext.
    for (message, case) in batch.iter_mut().zip(cases).filter(|(_, case)| case.damage.is_some()) {
        let (text, zeros) = message.bytes.split_at_mut(case.text.len());
        text.fill(0);
        zeros.fill(0);
    }
    (sealed, buffer, opened)
}

fn messages<'a>(buffer: &'a mut [u8], cases: &[Case]) -> Vec<Message<'a>> {
    let mut rest = buffer;
    let mut messages = Vec::new();
    for case in cases {
        let (bytes, others) = rest[case.gap..].split_at_mut(case.text.len() + TAG);
        messages.push(Message { nonce: nonce(case.counter), bytes });
        rest = others;
    }
    messages
}
