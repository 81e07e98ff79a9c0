package store

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/keys"
)

// tablesOf returns the tables of a store by number, with their sizes.
func tablesOf(t *testing.T, st *Store) map[uint64]uint64 {
	t.Helper()
	levels, err := st.db.SSTables()
	require.NoError(t, err)
	all := make(map[uint64]uint64)
	for _, level := range levels {
		for i := range level {
			all[numberOf(&level[i])] = level[i].Size
		}
	}
	return all
}

// TestOpensLeaveFewTables: however often a store is opened, written to and closed, or its process
// killed, it has few tables: ranges that grow at their end, or that are written to anywhere, and
// those whose keys are overwritten or deleted. All keys stay.
func TestOpensLeaveFewTables(t *testing.T) {
	t.Parallel()
	for _, level := range []Durability{Process, Disk, None, Replicated} {
		t.Run(fmt.Sprint("durability ", level), func(t *testing.T) {
			t.Parallel()
			const opens = 300
			disk, rng := crashfs.New(), rand.New(rand.NewPCG(1, 2))
			want := make(map[string]string)
			for i := range opens {
				st := openTest(t, Config{FS: disk, Durability: level, MemTableBytes: 256 << 10})
				require.LessOrEqual(t, len(tablesOf(t, st)), 2*mergeFrom, "open %d", i)
				b := st.DB().NewBatch()
				set := func(key []byte) {
					want[string(key)] = fmt.Sprint("value ", i)
					require.NoError(t, b.Set(key, []byte(want[string(key)]), nil))
				}
				for _, r := range []byte{keys.Lane, keys.Done, keys.Canceled} { // at the end
					set(binary.BigEndian.AppendUint32([]byte{r}, uint32(i)))
				}
				set(binary.BigEndian.AppendUint64([]byte{keys.Unique}, rng.Uint64())) // anywhere
				set(binary.BigEndian.AppendUint32([]byte{keys.Counters}, 1))          // again
				lease := binary.BigEndian.AppendUint64([]byte{keys.Lease}, uint64(i)) // for a moment
				require.NoError(t, b.Set(lease, nil, nil))
				require.NoError(t, b.SingleDelete(lease, nil))
				if gone := binary.BigEndian.AppendUint32([]byte{keys.Canceled}, uint32(i-10)); i >= 10 {
					delete(want, string(gone))
					require.NoError(t, b.Delete(gone, nil))
				}
				require.NoError(t, st.Commit(b))
				require.NoError(t, b.Close())
				if level == Replicated { // as before a snapshot: its log is elsewhere
					require.NoError(t, st.Flush(t.Context()))
				}
				if i%3 == 0 && level != None {
					disk = disk.Clone() // the process is killed
				}
				require.NoError(t, st.Close())
			}
			st := openTest(t, Config{FS: disk, Durability: level, MemTableBytes: 256 << 10})
			defer func() { require.NoError(t, st.Close()) }()
			have := make(map[string]string)
			it, err := st.DB().NewIter(nil)
			require.NoError(t, err)
			for valid := it.First(); valid; valid = it.Next() {
				have[string(it.Key())] = string(it.Value())
			}
			require.NoError(t, it.Close())
			require.Equal(t, want, have)
		})
	}
}

// TestLargeTablesStay: small tables are merged, and the large ones between and below them are not
// read for it.
func TestLargeTablesStay(t *testing.T) {
	t.Parallel()
	disk, rng := crashfs.New(), rand.New(rand.NewPCG(1, 2))
	open := func() *Store { return openTest(t, Config{FS: disk, MemTableBytes: 256 << 10}) }
	write := func(st *Store, key []byte, size int) {
		value := make([]byte, size)
		for i := range value {
			value[i] = byte(rng.Uint32())
		}
		b := st.DB().NewBatch()
		require.NoError(t, b.Set(key, value, nil))
		require.NoError(t, st.Commit(b))
		require.NoError(t, b.Close())
	}
	key := func(r byte, n int) []byte { return binary.BigEndian.AppendUint32([]byte{r}, uint32(n)) }
	ranges := []byte{keys.Dead, keys.Done, keys.Index}
	st := open()
	for i := range 300 {
		for _, r := range ranges {
			write(st, key(r, i), 16<<10)
		}
	}
	require.NoError(t, st.Flush(t.Context()))
	require.NoError(t, st.DB().Compact(t.Context(), []byte{0}, []byte{0xff}, false))
	large := make(map[uint64]uint64)
	for number, size := range tablesOf(t, st) {
		if size >= mergeRun {
			large[number] = size
		}
	}
	require.GreaterOrEqual(t, len(large), len(ranges))
	require.NoError(t, st.Close())

	for i := range 200 {
		st := open()
		require.LessOrEqual(t, len(tablesOf(t, st)), 2*len(large)+2*mergeFrom, "open %d", i)
		for _, r := range ranges {
			write(st, key(r, 1000+i), 100)
		}
		require.NoError(t, st.Close())
	}
	st = open()
	defer func() { require.NoError(t, st.Close()) }()
	tables := tablesOf(t, st)
	for number := range large {
		require.Contains(t, tables, number)
	}
}

// TestSmallRuns: which tables are merged.
func TestSmallRuns(t *testing.T) {
	t.Parallel()
	table := func(first, last string, size uint64) pebble.SSTableInfo {
		var info pebble.SSTableInfo
		info.Smallest.UserKey, info.Largest.UserKey, info.Size = []byte(first), []byte(last), size
		return info
	}
	const kb = 1 << 10
	for name, c := range map[string]struct {
		levels [][]pebble.SSTableInfo
		want   []string
	}{
		"none": {},
		"one":  {levels: [][]pebble.SSTableInfo{{table("a1", "a2", kb)}}},
		"neighbors in all levels": {
			[][]pebble.SSTableInfo{{table("a5", "a6", kb)}, {table("a1", "a2", kb), table("a3", "a4", kb)}},
			[]string{"a1-a6 3, 3 KiB, 2 too many"},
		},
		"one of each range": {levels: [][]pebble.SSTableInfo{{table("a1", "a2", kb), table("b1", "b2", kb)}}},
		"ranges": {
			[][]pebble.SSTableInfo{{table("a1", "a2", kb), table("a3", "a4", kb), table("b1", "b2", kb), table("c1", "c2", kb), table("c3", "c4", kb)}},
			[]string{"a1-a4 2, b1-b2 1, c1-c4 2, 5 KiB, 2 too many"},
		},
		"a large one between": {
			[][]pebble.SSTableInfo{{table("a1", "a2", kb), table("a3", "a4", kb), table("a5", "a6", 64*kb), table("a7", "a8", kb), table("a9", "ax", kb)}},
			[]string{"a1-a4 2, 2 KiB, 1 too many", "a7-ax 2, 2 KiB, 1 too many"},
		},
		"a large one below": {
			levels: [][]pebble.SSTableInfo{{table("a3", "a4", kb), table("a5", "a6", kb)}, {table("a1", "a9", 200*kb)}},
		},
		"many within a large one": {
			[][]pebble.SSTableInfo{{table("a3", "a4", kb), table("a5", "a6", kb), table("a7", "a7", kb)}, {table("a1", "a9", 200*kb)}},
			[]string{"a1-a9 4, 203 KiB, 3 too many"},
		},
		"much": {
			[][]pebble.SSTableInfo{{table("a0", "a0", 400*kb), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0)},
				{table("a1", "a1", 400*kb), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0)},
				{table("a2", "a2", 400*kb), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0)}},
			[]string{"a0-a1 14, 800 KiB, 13 too many", "a2-a2 7, 400 KiB, 6 too many"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var have []string
			for _, run := range smallRuns(c.levels) {
				text := ""
				for _, s := range run.spans {
					text += fmt.Sprintf("%s-%s %d, ", s.first, s.last, s.tables)
				}
				have = append(have, fmt.Sprintf("%s%d KiB, %d too many", text, run.bytes/kb, run.excess))
			}
			require.Equal(t, c.want, have)
		})
	}
}
