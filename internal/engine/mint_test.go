package engine

import (
	"bytes"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/keys"
)

// timeOf is the time of an ID, ms.
func timeOf(id keys.ID) int64 { return int64(keys.SinceMillis(keys.SinceOf(id))) }

// TestMintedTime: an ID has the time of its shard's clock.
func TestMintedTime(t *testing.T) {
	now := time.Now().UnixMilli()
	require.Equal(t, now, timeOf(testMinter(0, 1).at(uint64(now)).id(1)))
	require.EqualValues(t, int64(1<<48-1), timeOf(testMinter(0, 1).at(1<<48-1).id(1)), "the last that there is room for")
}

func testMinter(shard, shards int) *minter {
	return &minter{rand: rand.New(rand.NewPCG(1, 2)), shard: shard, shards: shards}
}

// at sets the wall clock, while the monotonic clock stands.
func (m *minter) at(wall uint64) *minter {
	m.tick(wall, m.read)
	return m
}

// TestMinterIncreases: whatever the wall clock does, IDs and numbers of a
// shard increase, and IDs show the time as long as it goes forward.
func TestMinterIncreases(t *testing.T) {
	const hour = uint64(60 * 60 * 1000)
	rapid.Check(t, func(t *rapid.T) {
		shards := rapid.IntRange(1, 5).Draw(t, "shards")
		m := testMinter(rapid.IntRange(0, shards-1).Draw(t, "shard"), shards)
		wall := 1000 * hour
		latest := uint64(0)
		var last keys.ID
		var lastNumber uint64
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "wall clock") {
			case 0:
				wall++
			case 1:
				wall -= hour
			case 2:
				wall += hour
			}
			ahead := wall > latest
			latest = max(latest, wall)
			if rapid.Bool().Draw(t, "a number in between") {
				n := m.at(wall).next()
				require.Greater(t, n, lastNumber)
				lastNumber = n
			}
			id := m.at(wall).id(1)
			require.Positive(t, bytes.Compare(id[:], last[:]))
			require.Greater(t, keys.SinceOf(id), keys.SinceOf(last), "without a look at what is random")
			require.Greater(t, m.clock, lastNumber)
			if ahead {
				require.EqualValues(t, wall, timeOf(id))
			}
			last, lastNumber = id, m.clock
		}
	})
}

// TestMinterWithinAMillisecond: when its counter is used up, the next
// millisecond is taken in advance.
func TestMinterWithinAMillisecond(t *testing.T) {
	const wall = 5000
	m := testMinter(0, 1)
	var last keys.ID
	for i := range 3 << clockShift {
		id := m.at(wall).id(1)
		require.Positive(t, bytes.Compare(id[:], last[:]), "keys.ID %d", i)
		require.EqualValues(t, wall+i>>clockShift, timeOf(id))
		last = id
	}
}

// TestMinterResumes: a minter that begins with the clock of another goes on after it.
func TestMinterResumes(t *testing.T) {
	m := testMinter(0, 1)
	first := m.at(5000).id(1)
	next := &minter{clock: m.clock, rand: m.rand, shards: 1}
	second := next.at(4000).id(1)
	require.Positive(t, bytes.Compare(second[:], first[:]))
}

// TestMinterSetBack: places of tasks that become ready again never go back, lie
// behind what was minted before, and are told apart by the millisecond, at half
// the speed of time until the wall clock has caught up.
func TestMinterSetBack(t *testing.T) {
	const hour = uint64(60 * 60 * 1000)
	rapid.Check(t, func(t *rapid.T) {
		m := testMinter(0, 1)
		wall, now, last := 1000*hour, uint64(0), uint64(0)
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			passed := rapid.SampledFrom([]uint64{0, 1, 2, 3, 1000, hour}).Draw(t, "passed")
			now += passed
			wall += passed
			switch rapid.IntRange(0, 20).Draw(t, "wall clock") {
			case 0:
				wall -= 3 * hour
			case 1:
				wall += 3 * hour
			case 2: // the process is another
				m = &minter{clock: m.clock, rand: m.rand, shards: 1}
			}
			before := m.time
			m.tick(wall, now)
			require.GreaterOrEqual(t, m.time, wall)
			require.GreaterOrEqual(t, m.time, last)
			require.LessOrEqual(t, m.time, max(wall, last, before+(passed+1)/2))
			late := rapid.SampledFrom([]uint64{0, 1, hour}).Draw(t, "late")
			require.Equal(t, m.time-late, keys.SinceMillis(m.sinceAgo(late)))
			place := keys.SinceMillis(m.since())
			require.Equal(t, m.time, place)
			last = place
			if rapid.Bool().Draw(t, "mint") {
				last = max(last, uint64(timeOf(m.id(1))))
				require.GreaterOrEqual(t, last, place)
			}
		}
		now, wall = now+100_000*hour, wall+100_000*hour
		m.tick(wall, now)
		require.Equal(t, wall, m.time)
	})
}

// TestMintedIDs: every keys.ID is a UUIDv7 of the variant of RFC 9562, lies in its
// first place, and holds its lane.
func TestMintedIDs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shards := rapid.IntRange(1, 256).Draw(t, "shards")
		shard := rapid.IntRange(0, shards-1).Draw(t, "shard")
		m := testMinter(shard, shards)
		m.clock = rapid.Uint64Range(0, 1<<60-100).Draw(t, "clock")
		wall := rapid.Uint64Range(0, 1<<48-1).Draw(t, "wall")
		for _, lane := range []uint32{0, 1, rapid.Uint32Range(0, keys.MaxLane).Draw(t, "lane"), keys.MaxLane} {
			id := m.at(wall).id(lane)
			require.EqualValues(t, 7, id[6]>>4, "version of %s", id)
			require.EqualValues(t, 2, id[8]>>6, "variant of %s", id)
			require.Equal(t, lane, keys.LaneOf(id))
			require.True(t, keys.IsFirstPlace(keys.SinceOf(id)))
			require.Equal(t, m.clock&(1<<clockShift-1), keys.SinceOf(id)&(1<<clockShift-1), "counter")
			require.Equal(t, m.clock>>clockShift, keys.SinceMillis(keys.SinceOf(id)))
			require.Equal(t, shard, keys.ShardOf(id, shards))
		}
	})
}

// TestRouting compares the shard of an keys.ID with the FNV-1a of the standard
// library, and has every shard of every count mint IDs for itself.
func TestRouting(t *testing.T) {
	route := func(id keys.ID, shards int) int {
		h := fnv.New64a()
		_, _ = h.Write(id[:]) // never fails
		return int(h.Sum64() % uint64(shards))
	}
	for shards := 1; shards <= 256; shards++ {
		for shard := range shards {
			id := testMinter(shard, shards).at(uint64(shards)).id(1)
			require.Equal(t, shard, route(id, shards), "shards %d", shards)
			require.Equal(t, shard, keys.ShardOf(id, shards), "shards %d", shards)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		id, shards := keys.ID(rapid.SliceOfN(rapid.Byte(), keys.IDLen, keys.IDLen).Draw(t, "id")), rapid.IntRange(1, 256).Draw(t, "shards")
		require.Equal(t, route(id, shards), keys.ShardOf(id, shards))
	})
	require.Zero(t, keys.ShardOf(keys.ID(bytes.Repeat([]byte{math.MaxUint8}, keys.IDLen)), 1))
}

// TestIDsDiffer: minters of one shard that know nothing of each other make
// different IDs in the same millisecond.
func TestIDsDiffer(t *testing.T) {
	seen := make(map[keys.ID]bool)
	for seed := range uint64(100) {
		m := minter{rand: rand.New(rand.NewPCG(seed, 0)), shard: 3, shards: 4}
		seen[m.at(1).id(1)] = true
	}
	require.Len(t, seen, 100)
}
