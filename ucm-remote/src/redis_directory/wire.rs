//! What stands in the server, byte by byte.
//!
//! | key | type | content |
//! |---|---|---|
//! | `{ucm:<namespace>}:members` | hash | peer → end of its registration (ms of the server's clock, decimal), a space, [member] |
//! | `{ucm:<namespace>}:ended` | hash | boot token of a run that is over → when (ms) |
//! | `{ucm:<namespace>}:epoch` | string | µs of the server's clock when it was first asked |
//! | `ucm:<namespace>:o:` block, identity (16 + 32 bytes) | hash | [field] → [record] |
//!
//! The first three share a slot of a cluster by their tag; records spread over all slots. `field` is
//! the boot token (16 bytes), then the peer's name; `record` is generation and length (8 bytes each, big
//! end first) and tier (1); `member` is boot token (16), capacity and free bytes (8 each, big end first),
//! address. Names and addresses are UTF-8.
//!
//! **Invariant:** what cannot be read is left out and counted, never guessed.

use crate::{Generation, Member, ObjectKey, PeerId, Record, Tier, Token};

/// Keeps a registration and answers `[1 or 0 (refused), epoch]`. A run that is over, or whose
/// registration has run out, never comes back.
/// Keys: members, ended, epoch. Arguments: peer, member, milliseconds to live.
pub(super) const REGISTER: &str = r"
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local epoch = redis.call('GET', KEYS[3])
if not epoch then
  epoch = t[1] .. string.format('%06d', t[2])
  redis.call('SET', KEYS[3], epoch)
end
local mine = string.sub(ARGV[2], 1, 16)
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  local space = string.find(old, ' ', 1, true)
  local ends = space and tonumber(string.sub(old, 1, space - 1)) or 0
  local boot = space and string.sub(old, space + 1, space + 16) or ''
  if boot ~= mine or ends <= now then
    redis.call('HSET', KEYS[2], boot, now)
  end
end
if redis.call('HEXISTS', KEYS[2], mine) == 1 then return {0, epoch} end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now + ARGV[3]) .. ' ' .. ARGV[2])
return {1, epoch}
";

/// Answers peer, member, peer, member, … of those whose registration goes on; ends the others.
/// Keys: members, ended.
pub(super) const MEMBERS: &str = r"
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local all = redis.call('HGETALL', KEYS[1])
local live = {}
for i = 1, #all, 2 do
  local space = string.find(all[i + 1], ' ', 1, true)
  local ends = space and tonumber(string.sub(all[i + 1], 1, space - 1)) or 0
  if ends > now then
    live[#live + 1] = all[i]
    live[#live + 1] = string.sub(all[i + 1], space + 1)
  else
    redis.call('HDEL', KEYS[1], all[i])
    if space then
      redis.call('HSET', KEYS[2], string.sub(all[i + 1], space + 1, space + 16), now)
    end
  end
end
return live
";

/// Ends a run, if it is the peer's present one. Keys: members, ended. Arguments: peer, boot token.
pub(super) const REMOVE: &str = r"
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old then return 0 end
local space = string.find(old, ' ', 1, true)
if not space or string.sub(old, space + 1, space + 16) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[2], redis.call('TIME')[1] * 1000)
return 1
";

/// Keeps a record unless a newer generation of the same run stands there. Generations are compared byte
/// by byte: strings are compared as the server's locale says, numbers end at 2⁵³.
/// Key: the object. Arguments: field, record, milliseconds to live.
pub(super) const ANNOUNCE: &str = r"
local old = redis.call('HGET', KEYS[1], ARGV[1])
local newer = 1
if old and #old == #ARGV[2] then
  for i = 1, 8 do
    local a, b = string.byte(old, i), string.byte(ARGV[2], i)
    if a ~= b then
      if a > b then newer = 0 end
      break
    end
  end
end
if newer == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return newer
";

/// Takes a record out if it is of this generation. Key: the object. Arguments: field, generation.
pub(super) const WITHDRAW: &str = r"
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and string.sub(old, 1, 8) == ARGV[2] then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
";

pub(super) fn object_key(namespace: &str, key: &ObjectKey) -> Vec<u8> {
    let mut name = format!("ucm:{namespace}:o:").into_bytes();
    name.extend_from_slice(&key.block);
    name.extend_from_slice(&key.identity);
    name
}

pub(super) fn field(peer: &PeerId, boot: Token) -> Vec<u8> {
    let mut field = boot.0.to_vec();
    field.extend_from_slice(peer.as_str().as_bytes());
    field
}

pub(super) fn parse_field(field: &[u8]) -> Option<(PeerId, Token)> {
    let (boot, peer) = field.split_first_chunk::<16>()?;
    Some((PeerId::new(std::str::from_utf8(peer).ok()?), Token(*boot)))
}

fn tier_number(tier: Tier) -> u8 {
    match tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Storage => 2,
    }
}

pub(super) fn record(record: &Record) -> Vec<u8> {
    let mut bytes = record.generation.0.to_be_bytes().to_vec();
    bytes.extend_from_slice(&record.len.to_be_bytes());
    bytes.push(tier_number(record.tier));
    bytes
}

pub(super) fn parse_record(field: &[u8], record: &[u8]) -> Option<Record> {
    let (peer, boot) = parse_field(field)?;
    let (generation, rest) = record.split_first_chunk::<8>()?;
    let (len, tier) = rest.split_first_chunk::<8>()?;
    let tier = match tier {
        [0] => Tier::Device,
        [1] => Tier::Host,
        [2] => Tier::Storage,
        _ => return None,
    };
    let generation = Generation(u64::from_be_bytes(*generation));
    Some(Record { peer, boot, generation, len: u64::from_be_bytes(*len), tier })
}

pub(super) fn member(member: &Member) -> Vec<u8> {
    let mut bytes = member.boot.0.to_vec();
    bytes.extend_from_slice(&member.capacity_bytes.to_be_bytes());
    bytes.extend_from_slice(&member.free_bytes.to_be_bytes());
    bytes.extend_from_slice(member.address.as_bytes());
    bytes
}

pub(super) fn parse_member(peer: &[u8], member: &[u8]) -> Option<Member> {
    let (boot, rest) = member.split_first_chunk::<16>()?;
    let (capacity, rest) = rest.split_first_chunk::<8>()?;
    let (free, address) = rest.split_first_chunk::<8>()?;
    Some(Member {
        peer: PeerId::new(std::str::from_utf8(peer).ok()?),
        boot: Token(*boot),
        address: std::str::from_utf8(address).ok()?.to_owned(),
        capacity_bytes: u64::from_be_bytes(*capacity),
        free_bytes: u64::from_be_bytes(*free),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nonsense_is_not() {
        let peer = PeerId::new("pëer");
        let mut one = Record::new(peer.clone(), Token([3; 16]), Generation(1 << 60), u64::MAX);
        for tier in [Tier::Device, Tier::Host, Tier::Storage] {
            one.tier = tier;
            let (name, bytes) = (field(&peer, Token([3; 16])), record(&one));
            assert_eq!(parse_record(&name, &bytes), Some(one.clone()));
            assert_eq!(parse_record(&name, &bytes[1..]), None);
            assert_eq!(parse_record(&name[..15], &bytes), None);
            assert_eq!(
                parse_record(&name[..17], &bytes),
                Some(Record { peer: PeerId::new("p"), ..one.clone() })
            );
        }
        assert_eq!(parse_record(&field(&peer, Token([3; 16])), &[9; 17]), None);
        let mut someone = Member::new(peer, Token([4; 16]), "[::1]:7");
        (someone.capacity_bytes, someone.free_bytes) = (7, u64::MAX);
        let bytes = member(&someone);
        assert_eq!(parse_member("pëer".as_bytes(), &bytes), Some(someone));
        assert_eq!(parse_member(&[0xff], &bytes), None);
        assert_eq!(parse_member(b"p", &bytes[..31]), None);
    }
}
