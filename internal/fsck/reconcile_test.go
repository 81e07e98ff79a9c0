package fsck_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/convert"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/store"
)

const memTableBytes = 256 << 10

// openStores opens so many stores of replicas on disks that can lose power.
func openStores(t *testing.T, n int) (stores []*store.Store, disks []*crashfs.Disk) {
	caches := store.NewCaches(1<<20, memTableBytes, n)
	t.Cleanup(caches.Close)
	for i := range n {
		disks = append(disks, crashfs.New())
		st := openStore(t, fmt.Sprint("store", i), disks[i], caches, true)
		t.Cleanup(func() { require.NoError(t, st.Close()) })
		stores = append(stores, st)
	}
	return stores, disks
}

func openStore(t *testing.T, name string, disk vfs.FS, caches *store.Caches, create bool) *store.Store {
	st, err := store.Open(name, store.Config{
		FS: disk, Log: slog.New(slog.DiscardHandler), Durability: store.Replicated,
		MemTableBytes: memTableBytes, ReclaimFrom: store.ReclaimFrom,
	}, caches, create)
	require.NoError(t, err)
	return st
}

func set(t *testing.T, st *store.Store, key, value []byte) {
	b := st.DB().NewBatch()
	require.NoError(t, b.Set(key, value, nil))
	require.NoError(t, st.Commit(b))
	require.NoError(t, b.Close())
}

func contents(t *testing.T, r pebble.Reader) map[string]string {
	all := make(map[string]string)
	require.NoError(t, store.ScanPrefix(r, nil, func(key, value []byte) error {
		all[string(key)] = string(value)
		return nil
	}))
	return all
}

func numbered(kind byte, shard uint32) []byte { return keys.AppendNumbered(nil, kind, shard) }

// reconcile makes stores agree. From the log, it returns the number of stores that lack messages of
// another one, and the number of corrected entries.
func reconcile(stores []*store.Store, differ bool) (missing, corrected int, err error) {
	var log bytes.Buffer
	err = convert.Reconcile(stores, differ, slog.New(slog.NewTextHandler(&log, nil)))
	for line := range strings.Lines(log.String()) {
		if _, entries, ok := strings.Cut(line, "entries="); ok {
			corrected, _ = strconv.Atoi(strings.TrimSpace(entries))
		} else {
			missing++
		}
	}
	return missing, corrected, err
}

// TestReconcile: senders go on after the last message that their receivers have taken, and all
// shards have the latest settings of each queue. Nothing else changes, also in a second run. The
// result is durable.
func TestReconcile(t *testing.T) {
	t.Parallel()
	stores, disks := openStores(t, 3)
	number := func(n uint64) []byte { return keys.AppendNumber(nil, n) }
	settings := func(version uint64, json string) []byte {
		return keys.SettingsValue{Version: version, JSON: []byte(json)}.Append(nil)
	}
	mail, other := append([]byte{keys.Settings}, "mail"...), append([]byte{keys.Settings}, "other"...)

	set(t, stores[0], numbered(keys.Sent, 1), number(5))
	set(t, stores[1], numbered(keys.Inbound, 0), number(7)) // the sender has lost two messages
	set(t, stores[0], numbered(keys.Sent, 2), number(9))
	set(t, stores[2], numbered(keys.Inbound, 0), number(8)) // lost by the receiver: it comes again
	set(t, stores[0], numbered(keys.Inbound, 2), number(3)) // the sender has lost all of them
	set(t, stores[2], numbered(keys.Inbound, 2), number(1)) // to itself: both are of one moment
	set(t, stores[2], numbered(keys.Sent, 2), number(1))
	set(t, stores[0], mail, settings(2, `{"Paused":true}`))
	set(t, stores[1], mail, settings(4, `{}`))
	set(t, stores[2], other, settings(1, `{"Concurrency":3}`))

	var want []map[string]string
	for _, st := range stores {
		want = append(want, contents(t, st.DB()))
	}
	want[0][string(numbered(keys.Sent, 1))] = string(number(7))
	want[2][string(numbered(keys.Sent, 0))] = string(number(3))
	for i := range want {
		want[i][string(mail)] = string(settings(4, `{}`))
		want[i][string(other)] = string(settings(1, `{"Concurrency":3}`))
	}
	for range 2 {
		_, _, err := reconcile(stores, false)
		require.NoError(t, err)
		for i, st := range stores {
			require.Equal(t, want[i], contents(t, st.DB()), i)
		}
	}
	caches := store.NewCaches(1<<20, memTableBytes, 1)
	defer caches.Close()
	for i, disk := range disks {
		st := openStore(t, fmt.Sprint("store", i), disk.CrashClone(vfs.CrashCloneCfg{}), caches, false)
		require.Equal(t, want[i], contents(t, st.DB()), i)
		require.NoError(t, st.Close())
	}
}

// TestReconcileRemoved: if one shard has removed settings with the latest version in another shard,
// all shards remove these settings. All shards know the largest removed version.
func TestReconcileRemoved(t *testing.T) {
	t.Parallel()
	stores, _ := openStores(t, 3)
	settings := func(version uint64, json string) []byte {
		return keys.SettingsValue{Version: version, JSON: []byte(json)}.Append(nil)
	}
	key := func(queue string) []byte { return append([]byte{keys.Settings}, queue...) }
	set(t, stores[0], keys.GivenKey(), settings(7, "{}"))
	set(t, stores[1], keys.GivenKey(), settings(4, "{}"))
	set(t, stores[1], key("lost"), settings(7, `{"Paused":true}`)) // the removal has not come
	set(t, stores[2], key("lost"), settings(6, `{"Paused":true}`))
	set(t, stores[1], key("new"), settings(8, `{"Paused":true}`)) // its message has not come
	for i := range stores {
		set(t, stores[i], key("small"), settings(uint64(2+i), `{"Rate":1}`)) // older than the removed settings of others
	}
	for range 2 {
		_, _, err := reconcile(stores, false)
		require.NoError(t, err)
		for i, st := range stores {
			require.Equal(t, map[string]string{
				string(keys.GivenKey()): string(settings(7, "{}")),
				string(key("new")):      string(settings(8, `{"Paused":true}`)),
				string(key("small")):    string(settings(4, `{"Rate":1}`)),
			}, contents(t, st.DB()), i)
		}
	}
}

// TestReconcileDamage: an unreadable entry is damage, and nothing changes.
func TestReconcileDamage(t *testing.T) {
	t.Parallel()
	for _, bad := range [][2][]byte{
		{numbered(keys.Inbound, 2), keys.AppendNumber(nil, 1)}, // there is no such shard
		{numbered(keys.Sent, 1), []byte("x")},
		{append([]byte{keys.Settings}, "mail"...), []byte("x")},
	} {
		stores, _ := openStores(t, 2)
		set(t, stores[1], numbered(keys.Inbound, 0), keys.AppendNumber(nil, 7))
		set(t, stores[1], bad[0], bad[1])
		_, _, err := reconcile(stores, false)
		require.ErrorIs(t, err, base.ErrCorrupt)
		require.Empty(t, contents(t, stores[0].DB()))
	}
}
