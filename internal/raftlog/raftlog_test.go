package raftlog

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
)

func open(t testing.TB, fs vfs.FS, o Options) *Store {
	o.FS = fs
	s, err := Open("raft", o)
	require.NoError(t, err)
	return s
}

func group(t testing.TB, s *Store, n uint32) *Group {
	g, err := s.Group(n)
	require.NoError(t, err)
	return g
}

// entries returns entries of a term, with indexes from one through another.
func entries(term, from, through uint64) (logs []*raft.Log) {
	for i := from; i <= through; i++ {
		logs = append(logs, &raft.Log{
			Index: i, Term: term, Type: raft.LogBarrier, AppendedAt: time.Unix(int64(i), int64(term)).UTC(),
			Extensions: []byte("ex"), Data: fmt.Appendf(nil, "entry %d of term %d", i, term),
		})
	}
	return logs
}

// mixed returns entries; every second one is a large command.
func mixed(term, from, through uint64) []*raft.Log {
	logs := entries(term, from, through)
	for _, l := range logs {
		if l.Index%2 == 0 {
			l.Type, l.Data = raft.LogCommand, append(l.Data, make([]byte, largeData)...)
		}
	}
	return logs
}

// requireHead checks the head of an entry, which has no data if the entry is large.
func requireHead(t testing.TB, g *Group, want *raft.Log) {
	t.Helper()
	var l raft.Log
	data, err := g.GetHead(want.Index, &l)
	require.NoError(t, err)
	if !isLarge(want) {
		require.Zero(t, data)
		require.Equal(t, *want, l)
		return
	}
	require.Equal(t, len(want.Data), data)
	require.Equal(t, raft.Log{Index: want.Index, Term: want.Term, Type: raft.LogCommand}, l)
}

// requireLog checks that a log has these entries and no others.
func requireLog(t testing.TB, g *Group, want ...*raft.Log) {
	t.Helper()
	var first, last uint64
	if len(want) > 0 {
		first, last = want[0].Index, want[len(want)-1].Index
	}
	got, err := g.FirstIndex()
	require.NoError(t, err)
	require.Equal(t, first, got)
	got, err = g.LastIndex()
	require.NoError(t, err)
	require.Equal(t, last, got)
	for _, w := range want {
		var l raft.Log
		requireHead(t, g, w)
		require.NoError(t, g.GetLog(w.Index, &l))
		require.Equal(t, *w, l)
		requireHead(t, g, w)
	}
	for _, i := range []uint64{0, first - 1, last + 1, maxIndex} {
		require.True(t, g.GetLog(i, new(raft.Log)) == raft.ErrLogNotFound) // as Raft compares
		_, err := g.GetHead(i, new(raft.Log))
		require.True(t, err == raft.ErrLogNotFound)
	}
}

// TestLog makes the calls of Raft on a log, and checks it in memory, in Pebble, and after the store
// was opened again.
func TestLog(t *testing.T) {
	all := mixed(1, 1, 10)
	type step func(g *Group) error
	store := func(logs ...*raft.Log) step { return func(g *Group) error { return g.StoreLogs(logs) } }
	remove := func(from, through uint64) step {
		return func(g *Group) error { return g.DeleteRange(from, through) }
	}
	for _, tc := range []struct {
		name  string
		steps []step
		want  []*raft.Log
	}{
		{"empty", nil, nil},
		{"nothing", []step{store()}, nil},
		{"one", []step{func(g *Group) error { return g.StoreLog(all[0]) }}, all[:1]},
		{"several", []step{store(all[:3]...), store(all[3:]...)}, all},
		{"begins late", []step{store(all[5:]...)}, all[5:]},
		{"prefix goes", []step{store(all...), remove(1, 4)}, all[4:]},
		{"prefixes go", []step{store(all...), remove(1, 4), remove(5, 6)}, all[6:]},
		{"prefix goes, from below", []step{store(all[2:]...), remove(0, 4)}, all[4:]},
		{"suffix goes", []step{store(all...), remove(8, 10)}, all[:7]},
		{"suffix goes, from beyond", []step{store(all...), remove(8, maxIndex)}, all[:7]},
		{"both go", []step{store(all...), remove(1, 3), remove(8, 10)}, all[3:7]},
		{"suffix replaced", []step{store(all...), remove(8, 10), store(mixed(2, 8, 9)...)},
			append(all[:7:7], mixed(2, 8, 9)...)},
		{"all gone", []step{store(all...), remove(1, 10)}, nil},
		{"all gone in parts", []step{store(all...), remove(1, 9), remove(10, 10)}, nil},
		{"all replaced", []step{store(all...), remove(1, 10), store(mixed(2, 1, 2)...)}, mixed(2, 1, 2)},
		{"begins again later", []step{store(all...), remove(1, 10), store(mixed(2, 50, 52)...)}, mixed(2, 50, 52)},
		{"replaced behind a snapshot", []step{store(all...), store(mixed(2, 12, 13)...)}, mixed(2, 12, 13)},
		{"nothing to remove", []step{remove(1, 5), store(all[5:]...), remove(1, 5), remove(11, 20), remove(8, 7)}, all[5:]},
	} {
		for _, cache := range []int64{defaultCacheBytes, 1, 3 * 150} {
			t.Run(fmt.Sprintf("%s/cache=%d", tc.name, cache), func(t *testing.T) {
				mem := crashfs.New()
				s := open(t, mem, Options{CacheBytes: cache})
				g := group(t, s, 7)
				require.True(t, g.IsMonotonic())
				for _, step := range tc.steps {
					require.NoError(t, step(g))
				}
				requireLog(t, g, tc.want...)
				require.NoError(t, s.Close())

				s = open(t, mem, Options{})
				g = group(t, s, 7)
				requireLog(t, g, tc.want...)
				last, err := g.LastIndex()
				require.NoError(t, err)
				require.NoError(t, g.StoreLogs(mixed(3, last+1, last+2)))
				require.NoError(t, s.Close())
			})
		}
	}
}

func TestRefusesOrder(t *testing.T) {
	s := open(t, crashfs.New(), Options{})
	defer func() { require.NoError(t, s.Close()) }()
	g := group(t, s, 0)
	all := entries(1, 1, 10)
	require.ErrorIs(t, g.StoreLogs(entries(1, 0, 1)), errOrder)
	require.NoError(t, g.StoreLogs(all[2:5]))
	for _, logs := range [][]*raft.Log{
		all[:1], all[:2], all[:], all[3:6], all[4:5], {all[5], all[7]}, {all[6], all[5]}, {all[5], all[5]},
	} {
		require.ErrorIs(t, g.StoreLogs(logs), errOrder)
	}
	require.ErrorIs(t, g.DeleteRange(4, 4), errOrder)
	requireLog(t, g, all[2:5]...)
	require.NoError(t, g.StoreLogs(all[5:]))
	requireLog(t, g, all[2:]...)
}

func TestGroupsAreApart(t *testing.T) {
	mem := crashfs.New()
	s := open(t, mem, Options{CacheBytes: 1})
	numbers := []uint32{0, 1, 2, 255, 256, 1 << 31, maxGroup}
	logs := make(map[uint32][]*raft.Log)
	for i, n := range numbers {
		g := group(t, s, n)
		logs[n] = entries(uint64(n), uint64(i+1), uint64(i+10))
		require.NoError(t, g.StoreLogs(logs[n]))
		_, err := s.Group(n)
		require.ErrorContains(t, err, "in use")
	}
	require.NoError(t, s.groups[1].DeleteRange(0, maxIndex))
	logs[1] = nil
	require.NoError(t, s.groups[255].DeleteRange(0, 8))
	logs[255] = logs[255][5:]
	require.NoError(t, s.db.Flush())
	for range 2 {
		for _, n := range numbers {
			requireLog(t, s.groups[n], logs[n]...)
		}
		require.NoError(t, s.Close())
		s = open(t, mem, Options{})
		for _, n := range numbers {
			group(t, s, n)
		}
	}
	require.NoError(t, s.Close())
}

// TestTablesAreOfOneGroup: see spanOfGroup.
func TestTablesAreOfOneGroup(t *testing.T) {
	s := open(t, crashfs.New(), Options{})
	defer func() { require.NoError(t, s.Close()) }()
	for _, n := range []uint32{0, 1, maxGroup} {
		require.NoError(t, group(t, s, n).StoreLogs(entries(1, 1, 10)))
	}
	require.NoError(t, s.db.Flush())
	levels, err := s.db.SSTables()
	require.NoError(t, err)
	tables := 0
	for _, level := range levels {
		for _, table := range level {
			require.Equal(t, groupOf(table.Smallest.UserKey), groupOf(table.Largest.UserKey))
			tables++
		}
	}
	require.Equal(t, 3, tables)
}

// TestRestartsLeaveFewTables: after many opens, closes or kills, a node has few tables of its log,
// and the log is unchanged.
func TestRestartsLeaveFewTables(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	disk := crashfs.New()
	const each = 4
	opens := uint64(testkit.Sized(80, 200))
	for i := range opens {
		s := open(t, disk, Options{Sync: SyncProcess})
		require.Less(t, s.db.Metrics().Total().TablesCount, int64(48), "open %d", i)
		for n := range uint32(2) {
			require.NoError(t, group(t, s, n).StoreLogs(entries(1, 1+i*each, (i+1)*each)))
		}
		if i%3 == 0 {
			disk = disk.Clone() // the process is killed
		}
		require.NoError(t, s.Close())
	}
	s := open(t, disk, Options{})
	for n := range uint32(2) {
		requireLog(t, group(t, s, n), entries(1, 1, opens*each)...)
	}
	require.NoError(t, s.Close())
}

func TestGetLogFindsDamage(t *testing.T) {
	s := open(t, crashfs.New(), Options{CacheBytes: 1})
	defer func() { require.NoError(t, s.Close()) }()
	g := group(t, s, 3)
	require.NoError(t, g.StoreLogs(entries(1, 1, 2)))
	require.NoError(t, s.db.Set(appendKey(nil, 3, 2), []byte("rubbish!"), pebble.Sync))
	require.NoError(t, g.GetLog(1, new(raft.Log)))
	require.ErrorIs(t, g.GetLog(2, new(raft.Log)), ErrCorrupt)
}

// TestDamagedOptions: a flipped bit in the options of a log that was not closed is damage.
func TestDamagedOptions(t *testing.T) {
	disk := crashfs.New()
	s := open(t, disk, Options{})
	defer func() { require.NoError(t, s.Close()) }()
	require.NoError(t, group(t, s, 1).StoreLogs(entries(1, 1, 2)))
	killed := disk.Clone()
	image := testkit.ImageOf(t, killed, "raft")
	name := image.Files[slices.IndexFunc(image.Files, func(name string) bool { return strings.Contains(name, "OPTIONS-") })]
	at := bytes.Index(image.Content[name], []byte("merger=pebble")) + len("merger=pebbl")
	_, err := Open("raft", Options{FS: image.Flip(t, name, 8*at+7)})
	require.ErrorIs(t, err, ErrCorrupt)
	require.ErrorContains(t, err, "merger name")
}

func TestClosed(t *testing.T) {
	s := open(t, crashfs.New(), Options{CacheBytes: 1})
	g := group(t, s, 3)
	require.NoError(t, g.StoreLogs(entries(1, 1, 2)))
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.ErrorIs(t, g.StoreLogs(entries(1, 3, 3)), ErrClosed)
	require.ErrorIs(t, g.DeleteRange(1, 1), ErrClosed)
	require.ErrorIs(t, g.GetLog(1, new(raft.Log)), ErrClosed)
	_, err := s.Group(4)
	require.ErrorIs(t, err, ErrClosed)
}

func TestRecentEntriesAreShared(t *testing.T) {
	s := open(t, crashfs.New(), Options{})
	defer func() { require.NoError(t, s.Close()) }()
	g := group(t, s, 0)
	logs := entries(1, 1, 10)
	require.NoError(t, g.StoreLogs(logs))
	require.NoError(t, s.db.DeleteRange(appendKey(nil, 0, 0), appendKey(nil, 1, 0), pebble.Sync))
	requireLog(t, g, logs...) // Pebble has none
	var l raft.Log
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := g.GetLog(5, &l); err != nil {
			panic(err)
		}
	}))
	require.Same(t, &logs[4].Data[0], &l.Data[0])
	require.Same(t, &logs[4].Extensions[0], &l.Extensions[0])
}

func TestRecentIsBounded(t *testing.T) {
	const limit = 10_000
	s := &Store{cacheBytes: limit}
	g := newGroup(s, 0)
	s.groups = map[uint32]*Group{0: g}
	r := &g.recent
	rng := rand.New(rand.NewPCG(1, 2))
	var want []raft.Log // newest entries, beyond the limit too
	next := uint64(1)
	for range 2_000 {
		switch rng.IntN(40) {
		case 0:
			through := next - uint64(rng.IntN(20))
			r.dropThrough(through)
			for len(want) > 0 && want[0].Index <= through {
				want = want[1:]
			}
		case 1:
			from := max(next-min(next, uint64(rng.IntN(20))), 1)
			r.dropFrom(from)
			for len(want) > 0 && want[len(want)-1].Index >= from {
				want = want[:len(want)-1]
			}
			next = min(next, from)
		default:
			size := rng.IntN(800)
			if rng.IntN(100) == 0 {
				size = limit
			}
			l := raft.Log{Index: next, Term: rng.Uint64(), Data: make([]byte, size)}
			r.add(&l)
			s.trim()
			want = append(want, l)
			next++
		}
		var bytes int64
		held := 0
		for i := len(want) - 1; i >= 0; i-- {
			if r.get(want[i].Index) == nil {
				break
			}
			require.Equal(t, want[i], *r.get(want[i].Index))
			bytes += cost(&want[i])
			held++
		}
		want = want[len(want)-held:] // what is not held never comes back
		require.Equal(t, r.bytes.Load(), bytes)
		require.Equal(t, s.recent.Load(), bytes)
		require.LessOrEqual(t, bytes, int64(limit))
		require.Len(t, r.entries[r.head:], held)
		require.Nil(t, r.get(next))
		for _, l := range r.entries[:r.head] {
			require.Zero(t, l)
		}
		for _, l := range r.entries[len(r.entries):cap(r.entries)] {
			require.Zero(t, l)
		}
	}
}

// TestHeadsAreReadOnce: after Open, large entries are read once for the length of their data. The
// lengths are forgotten with the removal of the entries.
func TestHeadsAreReadOnce(t *testing.T) {
	mem := crashfs.New()
	s := open(t, mem, Options{CacheBytes: 1})
	all := mixed(1, 1, 10)
	g := group(t, s, 1)
	require.NoError(t, g.StoreLogs(all))
	require.Len(t, g.heads.of, 5)
	require.NoError(t, s.Close())

	s = open(t, mem, Options{CacheBytes: 1})
	defer func() { require.NoError(t, s.Close()) }()
	g = group(t, s, 1)
	require.Empty(t, g.heads.of)
	requireLog(t, g, all...)
	require.Len(t, g.heads.of, 5)
	require.NoError(t, s.db.Delete(appendKey(nil, 1, 2), nil))
	requireHead(t, g, all[1])
	require.NoError(t, g.DeleteRange(1, 3))
	require.NoError(t, g.DeleteRange(8, 10))
	require.Len(t, g.heads.of, 2)

	before := g.heads.replaced
	require.NoError(t, g.DeleteRange(6, 7))
	require.NoError(t, g.StoreLogs(mixed(2, 6, 6)))
	g.heads.learn(6, headOf(all[5]), before) // of a read that began earlier
	requireHead(t, g, mixed(2, 6, 6)[0])
}

// TestRecentHoldsWhatFits: an entry is removed only for lack of room, from the group that holds
// most: busy groups share the room of an idle one.
func TestRecentHoldsWhatFits(t *testing.T) {
	entry := func(i int) []*raft.Log { return []*raft.Log{{Index: uint64(i), Data: make([]byte, 100)}} }
	s := open(t, crashfs.New(), Options{CacheBytes: 6 * cost(entry(1)[0])})
	defer func() { require.NoError(t, s.Close()) }()
	var groups [3]*Group
	for n := range groups {
		groups[n] = group(t, s, uint32(n))
	}
	hold := func() (n [3]int) {
		for i, g := range groups {
			n[i] = len(g.recent.entries) - g.recent.head
		}
		return n
	}
	for i := 1; i <= 10; i++ {
		require.NoError(t, groups[0].StoreLogs(entry(i)))
		require.Equal(t, [3]int{min(i, 6), 0, 0}, hold())
	}
	for i := 1; i <= 10; i++ {
		require.NoError(t, groups[1].StoreLogs(entry(i)))
		require.Equal(t, [3]int{6 - min(i, 3), min(i, 3), 0}, hold())
	}
	for i := 1; i <= 10; i++ {
		require.NoError(t, groups[2].StoreLogs(entry(i)))
	}
	require.Equal(t, [3]int{2, 2, 2}, hold())
	require.NoError(t, groups[0].DeleteRange(1, 10))
	require.NoError(t, groups[1].StoreLogs([]*raft.Log{{Index: 11, Data: make([]byte, 1000)}}))
	require.Equal(t, [3]int{0, 0, 2}, hold(), "what does not fit takes nothing from others")
	require.Equal(t, 2*cost(entry(1)[0]), s.recent.Load())
}

// TestBlockCacheIsSmall: entries that were read do not stay in memory, beside memtables.
func TestBlockCacheIsSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 80 MB")
	}
	const entryBytes, n = 1 << 20, 80
	s := open(t, crashfs.New(), Options{CacheBytes: 1})
	defer func() { require.NoError(t, s.Close()) }()
	g := group(t, s, 0)
	data := make([]byte, entryBytes)
	_, _ = rand.NewChaCha8([32]byte{}).Read(data)
	for i := uint64(1); i <= n; i++ {
		require.NoError(t, g.StoreLog(&raft.Log{Index: i, Data: data}))
	}
	require.NoError(t, s.db.Flush())
	for i := uint64(1); i <= n; i++ {
		require.NoError(t, g.GetLog(i, new(raft.Log)))
		m := s.db.Metrics()
		memTables := int64(m.MemTable.Size + m.MemTable.ZombieSize)
		require.LessOrEqual(t, m.BlockCache.Size+memTables, int64(blockCacheBytes+2*memTableBytes))
	}
}

// TestTruncationBoundsDisk appends 704 MB and keeps a tail of 50 MB. The directory must stop
// growing: memtables and logs count for more than the tail.
func TestTruncationBoundsDisk(t *testing.T) {
	testkit.OnlyLong(t, "writes 704 MB")
	const entryBytes, appended, keep, bound = 64 << 10, 704 << 20, 800, 480 << 20
	dir := t.TempDir()
	s, err := Open(dir, Options{FS: vfs.Default, Sync: SyncNone})
	require.NoError(t, err)
	g := group(t, s, 0)
	data := make([]byte, entryBytes)
	_, _ = rand.NewChaCha8([32]byte{}).Read(data)
	for i := uint64(1); i <= appended/entryBytes; i++ {
		require.NoError(t, g.StoreLog(&raft.Log{Index: i, Data: data}))
		if i%100 == 0 && i > keep {
			require.NoError(t, g.DeleteRange(1, i-keep))
			require.Less(t, directoryBytes(t, dir), int64(bound))
		}
	}
	require.NoError(t, s.Close())
}

func directoryBytes(tb testing.TB, dir string) (n int64) {
	require.NoError(tb, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // deleted meanwhile
		}
		if info, err := e.Info(); err == nil && !e.IsDir() {
			n += info.Size()
		}
		return nil
	}))
	return n
}

// TestConcurrent makes the calls of Raft's goroutines on several groups.
func TestConcurrent(t *testing.T) {
	const groups, count, keep = 4, 1000, 50
	s := open(t, crashfs.New(), Options{CacheBytes: 2_000})
	var wg sync.WaitGroup
	for n := range uint32(groups) {
		g := group(t, s, n)
		stored := make(chan struct{})
		wg.Go(func() { // the main goroutine of Raft
			defer close(stored)
			for i := uint64(1); i <= count; {
				logs := entries(1, i, i+i%3)
				require.NoError(t, g.StoreLogs(logs))
				i += uint64(len(logs))
				if i%7 == 0 {
					require.NoError(t, g.DeleteRange(i-1, i-1))
					require.NoError(t, g.StoreLogs(entries(1, i-1, i-1)))
				}
			}
		})
		wg.Go(func() { // snapshots
			for {
				select {
				case <-stored:
					return
				default:
				}
				first, err := g.FirstIndex()
				require.NoError(t, err)
				last, err := g.LastIndex()
				require.NoError(t, err)
				if last > keep {
					require.NoError(t, g.DeleteRange(first, last-keep))
				}
			}
		})
		for range 2 { // replication
			wg.Go(func() {
				for {
					select {
					case <-stored:
						return
					default:
					}
					first, _ := g.FirstIndex()
					last, _ := g.LastIndex()
					for i := first; i <= last; i++ {
						var l raft.Log
						if err := g.GetLog(i, &l); err == raft.ErrLogNotFound {
							continue
						} else {
							require.NoError(t, err)
						}
						require.True(t, l.Index == i && bytes.Equal(l.Data, entries(1, i, i)[0].Data))
					}
				}
			})
		}
	}
	wg.Wait()
	require.NoError(t, s.Close())
}

// TestMissingEntry: a missing entry is damage.
func TestMissingEntry(t *testing.T) {
	s, err := Open("dir", Options{FS: crashfs.New(), CacheBytes: 1})
	require.NoError(t, err)
	g, err := s.Group(1)
	require.NoError(t, err)
	for i := range uint64(3) {
		require.NoError(t, g.StoreLog(&raft.Log{Index: i + 1}))
	}
	require.NoError(t, s.db.Delete(appendKey(nil, 1, 2), pebble.NoSync))
	require.ErrorIs(t, g.GetLog(2, new(raft.Log)), ErrCorrupt)
	require.NoError(t, g.GetLog(3, new(raft.Log)))
	require.Equal(t, raft.ErrLogNotFound, g.GetLog(4, new(raft.Log)))
	require.NoError(t, s.Close())
}
