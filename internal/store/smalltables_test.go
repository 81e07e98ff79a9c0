package store

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
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

// manyTables is twice the number of tables that begins a merge.
const manyTables = 48

// TestOpensLeaveFewTables: after any number of opens, writes and closes of a store, or kills of its
// process, the store has few tables. This holds for ranges that grow at their end, ranges with
// writes anywhere, and ranges with overwritten or deleted keys. All keys stay.
func TestOpensLeaveFewTables(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, level := range []Durability{Process, Disk, None, Replicated} {
		t.Run(fmt.Sprint("durability ", level), func(t *testing.T) {
			t.Parallel()
			opens := testkit.Sized(100, 300)
			disk, rng := crashfs.New(), rand.New(rand.NewPCG(1, 2))
			want := make(map[string]string)
			for i := range opens {
				st := openTest(t, Config{FS: disk, Durability: level, MemTableBytes: 256 << 10})
				require.LessOrEqual(t, len(tablesOf(t, st)), manyTables, "open %d", i)
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
					disk = disk.Clone() // a kill of the process
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

// TestLargeTablesStay: the store merges small tables without reads of the large tables between and
// below them.
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
		if size >= 1<<20 {
			large[number] = size
		}
	}
	require.GreaterOrEqual(t, len(large), len(ranges))
	require.NoError(t, st.Close())

	for i := range testkit.Sized(80, 200) {
		st := open()
		require.LessOrEqual(t, len(tablesOf(t, st)), 2*len(large)+manyTables, "open %d", i)
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
