package store

import (
	"bytes"
	"fmt"
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
	require.Equal(t, now, timeOf(testMinter(0, 1).at(uint64(now)).ID(1)))
	require.EqualValues(t, int64(1<<48-1), timeOf(testMinter(0, 1).at(1<<48-1).ID(1)), "the last that there is room for")
}

func testMinter(shard, shards int) *Minter {
	return &Minter{Rand: rand.New(rand.NewPCG(1, 2)), shard: shard, shards: shards}
}

// at sets the wall clock, while the monotonic clock stands.
func (m *Minter) at(wall uint64) *Minter {
	m.Tick(wall, m.read)
	return m
}

// TestMinterIncreases: for all steps of the wall clock, the IDs and numbers of a shard increase.
// The IDs show the time as long as the clock goes forward.
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
				n := m.at(wall).Next()
				require.Greater(t, n, lastNumber)
				lastNumber = n
			}
			id := m.at(wall).ID(1)
			require.Positive(t, bytes.Compare(id[:], last[:]))
			require.Greater(t, keys.SinceOf(id), keys.SinceOf(last), "without a look at what is random")
			require.Greater(t, m.Clock, lastNumber)
			if ahead {
				require.EqualValues(t, wall, timeOf(id))
			}
			last, lastNumber = id, m.Clock
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
		id := m.at(wall).ID(1)
		require.Positive(t, bytes.Compare(id[:], last[:]), "keys.ID %d", i)
		require.EqualValues(t, wall+i>>clockShift, timeOf(id))
		last = id
	}
}

// TestMinterResumes: a Minter that begins with the clock of another goes on after it.
func TestMinterResumes(t *testing.T) {
	m := testMinter(0, 1)
	first := m.at(5000).ID(1)
	next := &Minter{Clock: m.Clock, Rand: m.Rand, shards: 1}
	second := next.at(4000).ID(1)
	require.Positive(t, bytes.Compare(second[:], first[:]))
}

// TestMinterSetBack: places of tasks that become ready again never go back, and lie behind all
// places minted before. They differ by the millisecond. From the first reading of a wall clock that
// is behind until this clock has caught up, the places advance at half the speed of time.
func TestMinterSetBack(t *testing.T) {
	const hour = uint64(60 * 60 * 1000)
	rapid.Check(t, func(t *rapid.T) {
		m := testMinter(0, 1)
		wall, now, last, shown := 1000*hour, uint64(0), uint64(0), uint64(0)
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			passed := rapid.SampledFrom([]uint64{0, 1, 2, 3, 1000, hour}).Draw(t, "passed")
			now += passed
			wall += passed
			switch rapid.IntRange(0, 20).Draw(t, "wall clock") {
			case 0:
				wall -= 3 * hour
			case 1:
				wall += 3 * hour
			case 2: // a new process
				m = &Minter{Clock: m.Clock, Rand: m.Rand, shards: 1}
			}
			before, half := m.Time, min(passed/2, m.Time-min(shown, m.Time))
			m.Tick(wall, now)
			shown = wall
			require.GreaterOrEqual(t, m.Time, wall)
			require.GreaterOrEqual(t, m.Time, last)
			require.LessOrEqual(t, m.Time, max(wall, last, before+passed-half+1))
			late := rapid.SampledFrom([]uint64{0, 1, hour}).Draw(t, "late")
			require.Equal(t, m.Time-late, keys.SinceMillis(m.SinceAgo(late)))
			place := keys.SinceMillis(m.Since())
			require.Equal(t, m.Time, place)
			last = place
			if rapid.Bool().Draw(t, "mint") {
				last = max(last, uint64(timeOf(m.ID(1))))
				require.GreaterOrEqual(t, last, place)
			}
		}
		now, wall = now+100_000*hour, wall+100_000*hour
		m.Tick(wall, now)
		require.Equal(t, wall, m.Time)
	})
}

// TestMintedIDs: every keys.ID is a UUIDv7 of the variant of RFC 9562, lies in its
// first place, and holds its lane.
func TestMintedIDs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shards := rapid.IntRange(1, 256).Draw(t, "shards")
		shard := rapid.IntRange(0, shards-1).Draw(t, "shard")
		m := testMinter(shard, shards)
		m.Clock = rapid.Uint64Range(0, 1<<60-100).Draw(t, "clock")
		wall := rapid.Uint64Range(0, 1<<48-1).Draw(t, "wall")
		for _, lane := range []uint32{0, 1, rapid.Uint32Range(0, keys.MaxLane).Draw(t, "lane"), keys.MaxLane} {
			id := m.at(wall).ID(lane)
			require.EqualValues(t, 7, id[6]>>4, "version of %s", id)
			require.EqualValues(t, 2, id[8]>>6, "variant of %s", id)
			require.Equal(t, lane, keys.LaneOf(id))
			require.True(t, keys.IsFirstPlace(keys.SinceOf(id)))
			require.Equal(t, m.Clock&(1<<clockShift-1), keys.SinceOf(id)&(1<<clockShift-1), "counter")
			require.Equal(t, m.Clock>>clockShift, keys.SinceMillis(keys.SinceOf(id)))
			require.Equal(t, shard, keys.ShardOf(id, shards))
		}
	})
}

// TestRouting compares the shard of a keys.ID with the FNV-1a of the standard library. Every shard
// of every count mints IDs for itself.
func TestRouting(t *testing.T) {
	route := func(id keys.ID, shards int) int {
		h := fnv.New64a()
		_, _ = h.Write(id[:]) // never fails
		return int(h.Sum64() % uint64(shards))
	}
	for shards := 1; shards <= 256; shards++ {
		for shard := range shards {
			id := testMinter(shard, shards).at(uint64(shards)).ID(1)
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

// TestIDsDiffer: independent minters of one shard make different IDs in the same millisecond.
func TestIDsDiffer(t *testing.T) {
	seen := make(map[keys.ID]bool)
	for seed := range uint64(100) {
		m := Minter{Rand: rand.New(rand.NewPCG(seed, 0)), shard: 3, shards: 4}
		seen[m.at(1).ID(1)] = true
	}
	require.Len(t, seen, 100)
}

// lives are successive processes of a shard, with a wall clock ahead of the true time, or behind
// it.
type lives struct {
	Minter
	uptime, now uint64 // now is the true time, ms
	ahead       int64  // ms
	stamps      []madeAt
}

// madeAt is a stamp, and its true time.
type madeAt struct{ stamp, at uint64 }

func newLives() *lives {
	l := &lives{Minter: *testMinter(0, 1), now: 1 << 40}
	l.pass(0)
	return l
}

func (l *lives) wall() uint64 { return uint64(int64(l.now) + l.ahead) }

// pass advances the time, and then makes a stamp.
func (l *lives) pass(d time.Duration) {
	l.now += uint64(d.Milliseconds())
	l.uptime += uint64(d.Milliseconds())
	l.Tick(l.wall(), l.uptime)
	l.stamps = append(l.stamps, madeAt{l.Next() >> clockShift, l.now})
}

// set sets the wall clock: it is ahead of the true time from then on.
func (l *lives) set(ahead time.Duration) {
	l.ahead = ahead.Milliseconds()
	l.Tick(l.wall(), l.uptime)
}

// reopen ends the process. The next one begins after some time, with a wall clock that is ahead.
func (l *lives) reopen(after, ahead time.Duration) {
	next := testMinter(0, 1)
	next.Clock, next.Sets = l.Clock, l.Sets
	l.Minter, l.ahead, l.uptime = *next, ahead.Milliseconds(), 0
	l.now += uint64(after.Milliseconds())
	l.pass(0)
}

// shownAge is the shown age of a stamp.
func (l *lives) shownAge(stamp uint64) time.Duration {
	c := Clock{Wall: l.wall(), Stamps: max(l.Time, l.Clock>>clockShift), Sets: l.Sets}
	shown, _ := c.ByWall(stamp)
	return time.Duration(int64(l.wall()-shown)) * time.Millisecond
}

// TestAgesWithSetClocks: the shown ages of stamps are right while the wall clock is right. This
// holds for stamps from the time before, during and after an error of the wall clock, ahead or
// behind, with a restart or without one. It also holds once the clock of stamps is no longer ahead.
func TestAgesWithSetClocks(t *testing.T) {
	for _, by := range []time.Duration{3 * time.Second, 10 * time.Second, time.Hour, 24 * time.Hour, 13 * 365 * 24 * time.Hour} {
		for _, sign := range []time.Duration{1, -1} {
			for _, how := range []string{"set", "restart"} {
				t.Run(fmt.Sprint(by*sign, " ", how), func(t *testing.T) {
					l := newLives()
					steps := func(but time.Duration) {
						t.Helper()
						for range 30 {
							l.pass(time.Minute)
						}
						for i, s := range l.stamps {
							age := time.Duration(l.now-s.at) * time.Millisecond
							but := but
							if how == "restart" { // the time without an open shard is unknown
								but += age / 10
							}
							require.InDelta(t, age.Seconds(), l.shownAge(s.stamp).Seconds(), but.Seconds(), "stamp %d of %v: age %v, clocks %v", i, len(l.stamps), age, l.Sets)
						}
					}
					steps(0)
					change, but, bad := l.set, 3*time.Second, time.Duration(0)
					if how == "restart" {
						bad = by + 10*time.Minute
						change = func(ahead time.Duration) {
							l.reopen(time.Minute, ahead)
							but += time.Minute
						}
					}
					for range 3 {
						change(by * sign)
						steps(max(but, bad))
						change(0)
						for range 4 {
							steps(but)
						}
						l.reopen(time.Minute, 0)
						but += time.Minute
						steps(but)
					}
				})
			}
		}
	}
}

// TestAgesGrow: for all clock settings and all ends of processes, no stamp appears as a future
// time, or as older than an earlier stamp. Each age grows by the time that passes between two
// settings of the clock.
func TestAgesGrow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		some := func(name string) time.Duration {
			return time.Duration(rapid.SampledFrom([]int{1, 1000, 3000, 10_000, 600_000, 3_600_000, 1 << 37}).Draw(t, name)) * time.Millisecond
		}
		l := newLives()
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0:
				l.set(some("ahead") - some("behind"))
			case 1:
				l.reopen(some("down"), some("ahead")-some("behind"))
			case 2:
				l.reopen(some("down"), 0)
			default:
				var before []time.Duration
				for _, s := range l.stamps {
					before = append(before, l.shownAge(s.stamp))
				}
				d := some("passes")
				l.pass(d)
				for i, age := range before {
					require.InDelta(t, (age + d).Seconds(), l.shownAge(l.stamps[i].stamp).Seconds(), 2.1+d.Seconds()/1000, "stamp %d, clocks %v", i, l.Sets)
				}
			}
			last := uint64(0)
			for i, s := range l.stamps {
				require.GreaterOrEqual(t, l.shownAge(s.stamp), -UsualLead*time.Millisecond)
				require.GreaterOrEqual(t, l.made(s.stamp), last, "stamp %d, clocks %v", i, l.Sets)
				last = l.made(s.stamp)
				ahead, behind := l.Sets.Most()
				require.LessOrEqual(t, s.stamp, l.made(s.stamp)+ahead)
				require.LessOrEqual(t, l.made(s.stamp), s.stamp+behind)
			}
		}
	})
}

// TestStampsAfterSet: a stamp made after the wall clock was set is not before the stored time of
// that, so that its age is known, and a restart does not change the time.
func TestStampsAfterSet(t *testing.T) {
	m := testMinter(0, 1)
	m.Tick(1_000_000, 0)
	m.Tick(996_000, 0)
	m.Tick(1_000_000, 1) // when Time, by half its speed, is there as well
	stamp := m.Stamp()
	require.GreaterOrEqual(t, stamp, m.Sets.Latest())
	require.EqualValues(t, 1_000_000, m.made(stamp))
	again := Minter{Clock: m.Clock, Sets: m.Sets}
	again.Tick(1_000_000, 0)
	require.Equal(t, m.Time, again.Time)
}
