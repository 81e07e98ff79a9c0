package entries

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/store"
)

const memTableBytes = 256 << 10

// openStore opens a new store of a replica.
func openStore(t testing.TB, name string, caches *store.Caches) *store.Store {
	st, err := store.Open(name, store.Config{
		FS: crashfs.New(), Log: slog.New(slog.DiscardHandler), Durability: store.Replicated,
		MemTableBytes: memTableBytes, ReclaimFrom: store.ReclaimFrom,
	}, caches, true)
	require.NoError(t, err)
	return st
}

// TestWrite: the store has the content of an entry of any size, with its index.
func TestWrite(t *testing.T) {
	t.Parallel()
	caches := store.NewCaches(1<<20, memTableBytes, 1)
	defer caches.Close()
	st := openStore(t, "store", caches)
	defer func() { require.NoError(t, st.Close()) }()
	var adopted []string
	var adoptErr error
	w := Writer{Adopt: func(identity []byte) error {
		adopted = append(adopted, string(identity))
		return adoptErr
	}}
	write := func(index, term uint64, key, value string) (clock bool, err error) {
		b := st.DB().NewBatch()
		defer func() { require.NoError(t, b.Close()) }()
		require.NoError(t, b.Set([]byte(key), []byte(value), nil))
		sent := (&Entry{Batch: b.Repr()}).Append(nil)
		before := bytes.Clone(sent)
		e, err := ParseEntry(sent)
		require.NoError(t, err)
		clock, err = w.Write(st, &e, index, term)
		require.Equal(t, before, sent, "other nodes are yet to get it")
		return clock, err
	}
	requireStored := func(index, term uint64, key, value string) {
		v, err := store.Lookup(st.DB(), []byte(key))
		require.NoError(t, err)
		require.Equal(t, value, string(v))
		appliedIndex, appliedTerm, err := store.Applied(st.DB())
		require.NoError(t, err)
		require.Equal(t, [2]uint64{index, term}, [2]uint64{appliedIndex, appliedTerm})
	}
	for _, e := range []struct {
		index, term uint64
		key, value  string
		clock       bool
	}{
		{5, 2, "k", "first", false},
		{7, 4, "k", "second", false},
		{8, 4, "k", strings.Repeat("x", 2*largeBatch), false}, // Pebble keeps the memory of these
		{9, 4, "k", "third", false},
		{10, 4, string([]byte{keys.LeaseTime}), "time", true},
		{11, 4, string([]byte{keys.Meta}), "identity", false},
	} {
		clock, err := write(e.index, e.term, e.key, e.value)
		require.NoError(t, err)
		require.Equal(t, e.clock, clock)
		requireStored(e.index, e.term, e.key, e.value)
	}
	require.Equal(t, []string{"identity"}, adopted)

	adoptErr = base.ErrFormat
	_, err := write(12, 4, string([]byte{keys.Meta}), "newer")
	require.ErrorIs(t, err, base.ErrFormat)
	requireStored(11, 4, string([]byte{keys.Meta}), "identity")

	_, err = w.Write(st, &Entry{}, 12, 5) // the entry of a new leader
	require.NoError(t, err)
	requireStored(12, 5, "k", "third")
}

// FuzzEntry: a damaged log entry is refused, or is a valid entry.
func FuzzEntry(f *testing.F) {
	e := Entry{Batch: []byte("batch"), Broadcast: []byte("broadcast")}
	f.Add(e.Append(nil))
	f.Add([]byte{})
	f.Add((&Entry{}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := ParseEntry(b)
		if err != nil {
			require.ErrorIs(t, err, base.ErrCorrupt)
			return
		}
		require.Equal(t, len(b), e.Size())
		require.Equal(t, b, e.Append(nil))
	})
}

// FuzzBatch: any bytes as the batch of an entry are written, or fail the store. They do not crash
// the process.
func FuzzBatch(f *testing.F) {
	caches := store.NewCaches(1<<20, memTableBytes, 1)
	f.Cleanup(caches.Close)
	stores := 0
	open := func(t testing.TB) *store.Store {
		stores++
		return openStore(t, fmt.Sprint("store", stores), caches)
	}
	st := open(f)
	f.Cleanup(func() { _ = st.Close() })
	b := st.DB().NewBatch()
	require.NoError(f, b.Set([]byte("k"), []byte("v"), nil))
	f.Add(bytes.Clone(b.Repr()))
	require.NoError(f, b.SingleDelete([]byte("k"), nil))
	require.NoError(f, b.DeleteRange([]byte("a"), []byte("b"), nil))
	require.NoError(f, b.LogData([]byte("data"), nil))
	f.Add(bytes.Clone(b.Repr()))
	f.Add(b.Repr()[:len(b.Repr())-1])
	require.NoError(f, b.Close())
	f.Add([]byte("short"))
	index := uint64(0)
	f.Fuzz(func(t *testing.T, repr []byte) {
		w := Writer{Adopt: func([]byte) error { return nil }}
		index++
		if _, err := w.Write(st, &Entry{Batch: repr}, index, 1); err != nil {
			_ = st.Close()
			st = open(t)
			return
		}
		got, _, err := store.Applied(st.DB())
		require.NoError(t, err)
		require.Equal(t, index, got)
	})
}
