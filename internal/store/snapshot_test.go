package store

import (
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// idOf returns the ID of a task of lane 7.
func idOf(n byte) keys.ID { return keys.ID{0, 0, 0, 0, 0, n, 0x70, 0, 0x80, 0, 0, 7, 0, 0, 0, n} }

func open(t *testing.T, entries ...[2][]byte) *pebble.DB {
	db, err := pebble.Open("db", &pebble.Options{FS: crashfs.New()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	for _, e := range entries {
		require.NoError(t, db.Set(e[0], e[1], nil))
	}
	return db
}

func rec(leases uint32) []byte {
	r := record.Record{Payload: []byte("payload")}
	r.Leases = leases
	return r.Encode()
}

// TestSnapshot: a snapshot finds a task in its first place, in the place in the index, and in the
// place of its end. A leased task has its newest lease, and no older one.
func TestSnapshot(t *testing.T) {
	first, moved, dead, none, stale := idOf(1), idOf(2), idOf(3), idOf(4), idOf(5)
	at := keys.Place{Range: keys.Scheduled, At: 99}
	bucket := keys.Place{Range: keys.Dead, Group: 3, At: 1000}
	lease := func(seq uint64, deadline uint64, entries ...keys.LeaseEntry) [2][]byte {
		key := make([]byte, 9)
		keys.PutLease(key, seq)
		value := keys.LeaseHeader{Deadline: deadline}.Append(nil)
		for _, e := range entries {
			value = e.Append(value, seq)
		}
		return [2][]byte{key, value}
	}
	entry := func(id keys.ID, leases uint32) keys.LeaseEntry {
		return keys.LeaseEntry{ID: id, Lane: 7, Since: keys.SinceOf(id), Leases: leases, Attempts: leases}
	}
	s := NewSnapshot(open(t,
		[2][]byte{keys.AppendNumbered(nil, keys.Lane, 7), keys.LaneValue{Queue: 3, Tenant: "tenant", Priority: 2}.Append(nil)},
		[2][]byte{keys.AppendNumbered(nil, keys.Queue, 3), []byte("queue")},
		[2][]byte{keys.FirstPlace(7, first).AppendKey(nil, first), rec(1)},
		[2][]byte{keys.FirstPlace(7, stale).AppendKey(nil, stale), rec(2)},
		[2][]byte{keys.AppendByID(nil, keys.Index, moved), at.Append(nil)},
		[2][]byte{at.AppendKey(nil, moved), append(keys.AppendLaneNumber(nil, 7), rec(0)...)},
		[2][]byte{keys.AppendBucket(nil, keys.Dead, 3, 1000), keys.AppendNumber(nil, 1)},
		[2][]byte{bucket.AppendKey(nil, dead), append(keys.EndedValue{Lane: 7, At: 5}.Append(nil), rec(0)...)},
		lease(1, 10, entry(first, 1), entry(stale, 2)),
		lease(2, 20, entry(first, 2)),
	))
	for id, want := range map[keys.ID]keys.Place{first: keys.FirstPlace(7, first), moved: at, dead: bucket} {
		p, value, err := s.Find(id)
		require.NoError(t, err)
		require.Equal(t, want, p)
		task, err := s.Task(id, p, value)
		require.NoError(t, err)
		require.Equal(t, &Lane{Number: 7, Queue: "queue", QueueNumber: 3, Tenant: "tenant", Priority: 2}, task.Lane)
		require.Equal(t, "payload", string(task.Record.Payload))
		require.Equal(t, id == first, task.Lease != nil)
		if id == first {
			require.EqualValues(t, 20, task.Lease.Deadline)
		}
		if id == dead {
			require.EqualValues(t, 5, task.Ended.At)
		}
	}
	p, value, err := s.Find(stale)
	require.NoError(t, err)
	task, err := s.Task(stale, p, value)
	require.NoError(t, err)
	require.Nil(t, task.Lease, "a lease of before")
	_, value, err = s.Find(none)
	require.NoError(t, err)
	require.Nil(t, value)
	_, err = s.Lane(8)
	require.ErrorIs(t, err, pebble.ErrNotFound)
	require.ErrorIs(t, err, base.ErrCorrupt)
	_, err = s.Task(first, bucket, []byte{1})
	require.ErrorIs(t, err, base.ErrCorrupt)
}

// TestScan: a scan visits the entries of a range and no others, in order; an error of a visit ends
// the scan.
func TestScan(t *testing.T) {
	db := open(t, [2][]byte{{keys.Queue, 2}, {2}}, [2][]byte{{keys.Queue, 1}, {1}}, [2][]byte{{keys.Queue + 1}, {3}})
	var got []byte
	require.NoError(t, Scan(db, keys.Queue, func(_, value []byte) error { got = append(got, value...); return nil }))
	require.Equal(t, []byte{1, 2}, got)
	require.ErrorIs(t, Scan(db, keys.Queue, func(_, _ []byte) error { return base.ErrCorrupt }), base.ErrCorrupt)
	b, err := Lookup(db, []byte{keys.Queue, 2})
	require.NoError(t, err)
	require.Equal(t, []byte{2}, b)
	b, err = Lookup(db, []byte{keys.Queue, 3})
	require.NoError(t, err)
	require.Nil(t, b)
}
