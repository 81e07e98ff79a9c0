package codeq

import (
	"bytes"
	"encoding/json"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/keys"
)

var (
	sampleID      = ID{0x01, 0x93, 0xb3, 0xc0, 0x12, 0x34, 0x7a, 0xbc, 0x85, 0, 1, 2, 0xde, 0xad, 0xbe, 0xef}
	sampleReceipt = Receipt{ID: sampleID, Token: 0xfedcba9876543210}
)

const (
	sampleIDText      = "0193b3c0-1234-7abc-8500-0102deadbeef"
	sampleReceiptText = sampleIDText + ".fedcba9876543210"
)

func drawAnyID(t *rapid.T) ID {
	return ID(rapid.SliceOfN(rapid.Byte(), keys.IDLen, keys.IDLen).Draw(t, "id"))
}

func TestIDText(t *testing.T) {
	require.Equal(t, sampleIDText, sampleID.String())
	id, err := ParseID(sampleIDText)
	require.NoError(t, err)
	require.Equal(t, sampleID, id)
	id, err = ParseID(strings.ToUpper(sampleIDText))
	require.NoError(t, err, "RFC 9562: either case is read")
	require.Equal(t, sampleID, id)

	rapid.Check(t, func(t *rapid.T) {
		id := drawAnyID(t)
		got, err := ParseID(id.String())
		require.NoError(t, err)
		require.Equal(t, id, got)
		b, err := json.Marshal(map[ID]ID{id: id})
		require.NoError(t, err)
		var m map[ID]ID
		require.NoError(t, json.Unmarshal(b, &m))
		require.Equal(t, map[ID]ID{id: id}, m)
	})
}

// withByte returns s with another byte at i.
func withByte(s string, i int, c byte) string { return s[:i] + string(c) + s[i+1:] }

func TestIDTextRefused(t *testing.T) {
	refused := []string{
		"", "-", strings.Repeat("0", 32), strings.Repeat("0", 36), strings.Repeat("-", 36),
		"{" + sampleIDText + "}", "urn:uuid:" + sampleIDText, " " + sampleIDText, sampleIDText + "\n",
	}
	for i := range sampleIDText {
		refused = append(refused, sampleIDText[:i], withByte(sampleIDText, i, 'g'), withByte(sampleIDText, i, ' '))
		if sampleIDText[i] == '-' {
			refused = append(refused, withByte(sampleIDText, i, '0'))
		} else {
			refused = append(refused, withByte(sampleIDText, i, '-'))
		}
	}
	for _, s := range refused {
		id, err := ParseID(s)
		require.ErrorIs(t, err, ErrInvalid, "%q", s)
		require.Zero(t, id, "%q", s)
		id = sampleID
		require.Error(t, id.UnmarshalText([]byte(s)))
		require.Equal(t, sampleID, id, "a refused text changes nothing: %q", s)
		var invalid *InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "ID", invalid.Field)
		require.Equal(t, s, invalid.Value)
	}
}

func TestReceiptText(t *testing.T) {
	require.Equal(t, sampleReceiptText, sampleReceipt.String())
	rapid.Check(t, func(t *rapid.T) {
		r := Receipt{ID: drawAnyID(t), Token: rapid.OneOf(rapid.Uint64Range(0, 9), rapid.Uint64()).Draw(t, "token")}
		b, err := r.MarshalText()
		require.NoError(t, err)
		require.Equal(t, r.String(), string(b))
		got := sampleReceipt
		require.NoError(t, got.UnmarshalText(b))
		require.Equal(t, r, got)
		b, err = json.Marshal(r)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, &got))
		require.Equal(t, r, got)
	})
}

func TestReceiptTextRefused(t *testing.T) {
	refused := []string{"", ".", sampleIDText, sampleIDText + ".1", sampleReceiptText + "0", strings.Repeat("0", len(sampleReceiptText))}
	for i := range sampleReceiptText {
		refused = append(refused, sampleReceiptText[:i], withByte(sampleReceiptText, i, 'x'))
	}
	for _, s := range refused {
		for _, before := range []Receipt{{}, {ID: ID{1}, Token: 1}} {
			r := before
			require.ErrorIs(t, r.UnmarshalText([]byte(s)), ErrInvalid, "%q", s)
			require.Equal(t, before, r, "a refused text changes nothing: %q", s)
		}
	}
}

func testMinter(shard, shards int) *engine.minter {
	return &engine.minter{rand: rand.New(rand.NewPCG(1, 2)), shard: shard, shards: shards}
}

// at sets the wall clock, while the monotonic clock stands.
func (m *engine.minter) at(wall uint64) *engine.minter {
	m.Tick(wall, m.read)
	return m
}

func TestIDTime(t *testing.T) {
	require.Equal(t, time.UnixMilli(0x0193b3c01234), sampleID.Time())
	now := time.Now()
	require.Equal(t, now.UnixMilli(), ID(testMinter(0, 1).at(uint64(now.UnixMilli())).id(1)).Time().UnixMilli())
	require.EqualValues(t, int64(1<<48-1), ID(testMinter(0, 1).at(1<<48-1).id(1)).Time().UnixMilli(), "the last that there is room for")
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
		var last ID
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
				require.EqualValues(t, wall, ID(id).Time().UnixMilli())
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
	var last ID
	for i := range 3 << engine.clockShift {
		id := m.at(wall).id(1)
		require.Positive(t, bytes.Compare(id[:], last[:]), "ID %d", i)
		require.EqualValues(t, wall+i>>engine.clockShift, ID(id).Time().UnixMilli())
		last = id
	}
}

// TestMinterResumes: a minter that begins with the clock of another goes on after it.
func TestMinterResumes(t *testing.T) {
	m := testMinter(0, 1)
	first := m.at(5000).id(1)
	next := &engine.minter{clock: m.clock, rand: m.rand, shards: 1}
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
				m = &engine.minter{clock: m.clock, rand: m.rand, shards: 1}
			}
			before := m.time
			m.Tick(wall, now)
			require.GreaterOrEqual(t, m.time, wall)
			require.GreaterOrEqual(t, m.time, last)
			require.LessOrEqual(t, m.time, max(wall, last, before+(passed+1)/2))
			late := rapid.SampledFrom([]uint64{0, 1, hour}).Draw(t, "late")
			require.Equal(t, m.time-late, keys.SinceMillis(m.sinceDue(wall-late, wall)))
			place := keys.SinceMillis(m.since())
			require.Equal(t, m.time, place)
			last = place
			if rapid.Bool().Draw(t, "mint") {
				last = max(last, uint64(ID(m.id(1)).Time().UnixMilli()))
				require.GreaterOrEqual(t, last, place)
			}
		}
		now, wall = now+100_000*hour, wall+100_000*hour
		m.Tick(wall, now)
		require.Equal(t, wall, m.time)
	})
}

// TestMintedIDs: every ID is a UUIDv7 of the variant of RFC 9562, lies in its
// first place, and holds its lane.
func TestMintedIDs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shards := rapid.IntRange(1, maxShards).Draw(t, "shards")
		shard := rapid.IntRange(0, shards-1).Draw(t, "shard")
		m := testMinter(shard, shards)
		m.clock = rapid.Uint64Range(0, 1<<60-100).Draw(t, "clock")
		wall := rapid.Uint64Range(0, 1<<48-1).Draw(t, "wall")
		for _, lane := range []uint32{0, 1, rapid.Uint32Range(0, keys.MaxLane).Draw(t, "lane"), keys.MaxLane} {
			id := m.at(wall).id(lane)
			require.EqualValues(t, 7, id[6]>>4, "version of %s", id)
			require.EqualValues(t, 2, id[8]>>6, "variant of %s", id)
			require.Equal(t, lane, keys.LaneOf(id))
			require.True(t, keys.Fresh(keys.SinceOf(id)))
			require.Equal(t, m.clock&(1<<engine.clockShift-1), keys.SinceOf(id)&(1<<engine.clockShift-1), "counter")
			require.Equal(t, m.clock>>engine.clockShift, keys.SinceMillis(keys.SinceOf(id)))
			require.Equal(t, shard, keys.ShardOf(id, shards))
		}
	})
}

// TestRouting compares the shard of an ID with the FNV-1a of the standard
// library, and has every shard of every count mint IDs for itself.
func TestRouting(t *testing.T) {
	route := func(id ID, shards int) int {
		h := fnv.New64a()
		_, _ = h.Write(id[:]) // never fails
		return int(h.Sum64() % uint64(shards))
	}
	for shards := 1; shards <= maxShards; shards++ {
		for shard := range shards {
			id := testMinter(shard, shards).at(uint64(shards)).id(1)
			require.Equal(t, shard, route(id, shards), "shards %d", shards)
			require.Equal(t, shard, keys.ShardOf(id, shards), "shards %d", shards)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		id, shards := drawAnyID(t), rapid.IntRange(1, maxShards).Draw(t, "shards")
		require.Equal(t, route(id, shards), keys.ShardOf(id, shards))
	})
	require.Equal(t, 0, ID(bytes.Repeat([]byte{math.MaxUint8}, keys.IDLen)).shard(1))
}

// TestIDsDiffer: minters of one shard that know nothing of each other make
// different IDs in the same millisecond.
func TestIDsDiffer(t *testing.T) {
	seen := make(map[ID]bool)
	for seed := range uint64(100) {
		m := engine.minter{rand: rand.New(rand.NewPCG(seed, 0)), shard: 3, shards: 4}
		seen[m.at(1).id(1)] = true
	}
	require.Len(t, seen, 100)
}
