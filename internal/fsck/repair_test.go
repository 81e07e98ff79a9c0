package fsck

import (
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
	"codeq/internal/record"
	"codeq/internal/store"
)

// fixture is a queue with one shard; the store of this shard has a task of each kind. entries are
// the entries to write, by key.
type fixture struct {
	t        *testing.T
	identity string // in place of the identity of the shard
	entries  map[string]string
	scope    uint64 // of the group

	ready, keyed, timed, leased, later, done, dead keys.ID
	holder, waiter                                 keys.ID // of the group
	parent, child                                  keys.ID
}

const (
	fixtureQueue, fixtureLane = 3, 7
	fixtureSeq                = 0xf0000
)

// fixtureCounts are the counts of the tasks in the fixture's queue.
var fixtureCounts = keys.Counts{Ready: 5, Leased: 1, Scheduled: 1, Blocked: 2, Done: 1, Dead: 1}

// counterValue has the counters of a queue. No number of the fixture is larger than the number of
// its lease record.
func counterValue(c keys.Counts) string {
	return string((&keys.CountersValue{Counts: c, Clock: fixtureSeq}).Append(nil))
}

// fixtureID is the ID of the n-th task.
func fixtureID(n byte) keys.ID {
	return keys.ID{0, 0, 0, 0, 0, n, 0x70, 0, 0x80, 0, 0, fixtureLane, 0, 0, 0, n}
}

// put stores a task at a place, with an index entry if it is not the first place.
func (f *fixture) put(id keys.ID, p keys.Place, rec *record.Record) {
	value := rec.Encode()
	switch p.Range {
	case keys.Task:
	case keys.Scheduled, keys.Blocked:
		value = append(keys.AppendLaneNumber(nil, fixtureLane), value...)
	default:
		value = append(keys.EndedValue{Lane: fixtureLane, At: 99, Result: []byte("result")}.Append(nil), value...)
		f.entries[string(keys.AppendBucket(nil, p.Range, p.Group, p.At))] = string(keys.AppendNumber(nil, 1))
	}
	f.entries[string(p.AppendKey(nil, id))] = string(value)
	if p != keys.FirstPlace(fixtureLane, id) && !keys.Ended(p.Range) {
		f.entries[string(keys.AppendByID(nil, keys.Index, id))] = string(p.Append(nil))
	}
}

// keyedRecord is a task with an idempotency key; the task does not hold the key.
func keyedRecord(key string, lasts uint64) *record.Record {
	rec := &record.Record{UniqueKey: key}
	rec.Unique, rec.UniqueFor = keys.UniqueHash("queue", "", "", "", key), lasts
	return rec
}

func newFixture(t *testing.T, identity string) *fixture {
	f := &fixture{t: t, identity: identity, entries: make(map[string]string), scope: keys.GroupScope("queue", "", "", "group")}
	for i, id := range []*keys.ID{
		&f.ready, &f.keyed, &f.timed, &f.leased, &f.holder, &f.waiter, &f.later, &f.done, &f.dead, &f.child, &f.parent,
	} {
		*id = fixtureID(byte(i + 1))
	}
	first := func(id keys.ID) keys.Place { return keys.FirstPlace(fixtureLane, id) }
	f.put(f.ready, first(f.ready), &record.Record{Payload: []byte("payload")})
	f.put(f.leased, first(f.leased), &record.Record{})
	unique := func(id keys.ID, key string, lasts uint64) {
		rec := keyedRecord(key, lasts)
		rec.Flags = record.HoldsKey
		v := keys.UniqueValue{ID: id}
		if lasts > 0 {
			v.Until = keys.SinceMillis(keys.SinceOf(id)) + lasts
			f.entries[string(keys.AppendFreed(nil, v.Until, rec.Unique))] = ""
		}
		f.entries[string(keys.AppendHashed(nil, rec.Unique))] = string(v.Append(nil))
		f.put(id, first(id), rec)
	}
	unique(f.keyed, "key", 0)
	unique(f.timed, "timed", 5000)
	grouped := func() *record.Record {
		rec := &record.Record{GroupKey: "group"}
		rec.Group = f.scope
		return rec
	}
	f.put(f.holder, first(f.holder), grouped())
	f.put(f.waiter, keys.Place{Range: keys.Blocked, Group: fixtureQueue, At: f.scope}, grouped())
	f.entries[string(keys.AppendScope(nil, f.scope))] = string(keys.GroupValue{Holder: f.holder, Waiting: true}.Append(nil))
	f.put(f.later, keys.Place{Range: keys.Scheduled, At: 12345}, &record.Record{})
	f.put(f.done, keys.Place{Range: keys.Done, Group: fixtureQueue, At: keys.Forever}, &record.Record{})
	f.put(f.dead, keys.Place{Range: keys.Dead, Group: fixtureQueue, At: keys.Forever}, &record.Record{Error: "boom"})
	parent := &record.Record{}
	parent.Parent = true
	f.put(f.parent, first(f.parent), parent)
	f.put(f.child, keys.Place{Range: keys.Blocked, Group: fixtureQueue}, &record.Record{Parents: [][record.IDLen]byte{f.parent}})
	f.entries[string(keys.AppendByID(nil, keys.Pending, f.child))] = string(keys.AppendNumber(nil, 1))
	f.entries[string(keys.AppendDependent(nil, f.parent, f.child))] = "\x00"

	lease := keys.LeaseHeader{Deadline: 1 << 40}.Append(nil)
	f.entries[string(keys.AppendNumber([]byte{keys.Lease}, fixtureSeq))] = string(keys.LeaseEntry{
		ID: f.leased, Lane: fixtureLane, Since: keys.SinceOf(f.leased), Token: fixtureSeq, Leases: 1, Attempts: 1, Duration: 1000,
	}.Append(lease, fixtureSeq))
	f.entries[string(keys.AppendNumbered(nil, keys.Lane, fixtureLane))] = string(keys.LaneValue{Queue: fixtureQueue, Seq: 1}.Append(nil))
	f.entries[string(keys.AppendNumbered(nil, keys.Queue, fixtureQueue))] = "queue"
	f.entries[string(append([]byte{keys.Settings}, "queue"...))] = string(keys.SettingsValue{Version: 1, JSON: []byte("{}")}.Append(nil))
	f.entries[string(keys.AppendSchedule(nil, "nightly"))] = "\x01"
	f.entries[string([]byte{keys.Meta})] = identity
	f.entries[string(keys.AppendNumbered(nil, keys.Counters, 0))] = counterValue(keys.Counts{})
	f.entries[string(keys.AppendNumbered(nil, keys.Counters, fixtureQueue))] = counterValue(fixtureCounts)
	return f
}

// write makes a closed queue of the entries.
func (f *fixture) write(entries map[string]string) *crashfs.Disk {
	disk := crashfs.New()
	d, err := manifest.Open(disk, "queue", manifest.Want{Shards: 1})
	require.NoError(f.t, err)
	require.NoError(f.t, d.FinishCreation())
	dir := manifest.ShardDir(disk, d.Path, 0)
	db, err := failstop.New(slog.New(slog.DiscardHandler), "store").Open(dir, &pebble.Options{FS: disk, FormatMajorVersion: store.Format})
	require.NoError(f.t, err)
	for key, value := range entries {
		if key == string([]byte{keys.Meta}) && string(value) == f.identity {
			value = d.Identity(0)
		}
		require.NoError(f.t, db.Set([]byte(key), []byte(value), pebble.NoSync))
	}
	require.NoError(f.t, db.Flush())
	require.NoError(f.t, db.Close())
	require.NoError(f.t, integrity.Seal(disk, dir))
	require.NoError(f.t, d.Close())
	return disk
}

// read returns the entries of a store.
func (f *fixture) read(disk vfs.FS, shard string) map[string]string {
	db, err := store.OpenForReading(disk, "queue/"+shard)
	require.NoError(f.t, err)
	all := make(map[string]string)
	for key, value := range entriesOf(f.t, db) {
		if key == string([]byte{keys.Meta}) && strings.HasPrefix(value, "codeq ") {
			value = f.identity
		}
		all[key] = value
	}
	require.NoError(f.t, db.Close())
	return all
}

// key is the key of a task in its first place.
func (f *fixture) key(id keys.ID) string {
	return string(keys.FirstPlace(fixtureLane, id).AppendKey(nil, id))
}

// TestRebuild damages the stored data in one way after the other. Verify finds the damage and
// changes nothing. A repair keeps the damaged store, and the new store has all data that follow
// from the records.
func TestRebuild(t *testing.T) {
	f := newFixture(t, "identity of the shard")
	sound := f.write(f.entries)
	r, err := Verify(sound, "queue", testRules, true, false)
	require.NoError(t, err)
	require.Empty(t, r.Problems)
	require.Empty(t, r.Shards[0].Kept)
	require.Equal(t, fixtureCounts, r.Shards[0].Tasks)
	require.Equal(t, f.entries, f.read(sound, "shard-000"))

	type entries = map[string]string
	hash := func(key string) [keys.UniqueLen]byte { return keys.UniqueHash("queue", "", "", "", key) }
	numbered := func(prefix byte, n uint32) string { return string(keys.AppendNumbered(nil, prefix, n)) }
	byID := func(prefix byte, id keys.ID) string { return string(keys.AppendByID(nil, prefix, id)) }
	remove := func(key string) func(entries) { return func(e entries) { delete(e, key) } }
	set := func(key, value string) func(entries) { return func(e entries) { e[key] = value } }
	freed := string(keys.AppendFreed(nil, keys.SinceMillis(keys.SinceOf(f.timed))+5000, hash("timed")))
	lease := string(keys.AppendNumber([]byte{keys.Lease}, fixtureSeq))
	counters := numbered(keys.Counters, fixtureQueue)
	counted := func(change func(*keys.Counts)) func(entries) {
		return func(e entries) {
			c := fixtureCounts
			change(&c)
			e[counters] = counterValue(c)
		}
	}
	took := keys.Message{Kind: keys.MsgEnded, Parent: keys.ID{1}, Child: keys.ID{2}} // no child waits for it
	asks := func(e entries) {                                                        // the child asks its parent again
		delete(e, string(keys.AppendDependent(nil, f.parent, f.child)))
		m := keys.Message{Kind: keys.MsgDepend, Parent: f.parent, Child: f.child}
		e[string(keys.AppendOutbound(nil, 0, 1))] = string(m.Append(nil))
		e[numbered(keys.Sent, 0)] = string(keys.AppendNumber(nil, 1))
	}
	rewritten := func(rec *record.Record) string { rec.Rewritten = true; return string(rec.Encode()) }
	scope := string(keys.AppendScope(nil, f.scope))
	done := keys.Place{Range: keys.Done, Group: fixtureQueue, At: keys.Forever}
	retained := set(string(done.AppendKey(nil, f.done)), string(append(
		keys.EndedValue{Lane: fixtureLane, At: 99}.Append(nil), (&record.Record{Head: record.Head{Retention: 5000}}).Encode()...,
	)))
	for name, c := range map[string]struct {
		damage func(entries)
		says   string
		want   func(entries) // content of the new store; nil: the content before
	}{
		"index entry":            {remove(byID(keys.Index, f.later)), "has no index entry", nil},
		"index entry of nothing": {set(byID(keys.Index, keys.ID{1}), f.entries[byID(keys.Index, f.later)]), "index says", nil},
		"index entry of another place": {
			set(byID(keys.Index, f.later), string(keys.Place{Range: keys.Scheduled, At: 5}.Append(nil))), "index says", nil,
		},
		"counter":          {counted(func(c *keys.Counts) { c.Ready++ }), "is counted as", nil},
		"no counters":      {remove(counters), "has tasks and no counters", nil},
		"size of a bucket": {set(string(keys.AppendBucket(nil, keys.Done, fixtureQueue, keys.Forever)), string(keys.AppendNumber(nil, 2))), "has 1 tasks", nil},
		"no bucket":        {remove(string(keys.AppendBucket(nil, keys.Dead, fixtureQueue, keys.Forever))), "has 1 tasks and no size", nil},
		"counts of kinds, which begin anew": {func(e entries) {
			p := keys.Place{Range: keys.Dead, Group: fixtureQueue, At: keys.Forever}
			key := string(p.AppendKey(nil, f.dead))
			value, err := changed(p, []byte(e[key]), func(rec *record.Record) { rec.DeadKind = 2 })
			require.NoError(t, err)
			e[key] = string(value)
			e[string(keys.AppendDeadKind(nil, fixtureQueue, 1))] = "boom"
		}, "does not count them", func(e entries) {
			clear(e)
			maps.Copy(e, f.entries)
		}},
		"turn of a group": {remove(scope), "which does not pass on", nil},
		"turn of a task that is gone": {
			set(scope, string(keys.GroupValue{Holder: keys.ID{1}, Waiting: true}.Append(nil))), "has the turn", nil,
		},
		"number of parents": {remove(byID(keys.Pending, f.child)), "waits for no parent", nil},
		"records of leases and the child of a parent": {
			func(e entries) { delete(e, lease); delete(e, string(keys.AppendDependent(nil, f.parent, f.child))) }, "is counted as",
			func(e entries) { delete(e, lease); counted(func(c *keys.Counts) { c.Ready++; c.Leased-- })(e); asks(e) },
		},
		"last message, which is under way": {
			set(string(keys.AppendOutbound(nil, 0, 1)), string(took.Append(nil))), "",
			func(e entries) {
				e[numbered(keys.Sent, 0)] = string(keys.AppendNumber(nil, 1))
				e[string(keys.AppendOutbound(nil, 0, 1))] = string(took.Append(nil))
			},
		},
		"time of an idempotency key": {remove(freed), "nothing frees", nil},
		"idempotency key of a time": {
			remove(string(keys.AppendHashed(nil, hash("timed")))), "does not hold its idempotency key",
			func(e entries) { // the key may have been released
				delete(e, string(keys.AppendHashed(nil, hash("timed"))))
				delete(e, freed)
				e[f.key(f.timed)] = rewritten(keyedRecord("timed", 5000))
			},
		},
		"idempotency key of a task": {
			remove(string(keys.AppendHashed(nil, hash("key")))), "does not hold its idempotency key",
			func(e entries) {
				delete(e, string(keys.AppendHashed(nil, hash("key"))))
				e[f.key(f.keyed)] = rewritten(keyedRecord("key", 0))
			},
		},
		"lease record without leases": {
			set(string(keys.AppendNumber([]byte{keys.Lease}, fixtureSeq-1)), f.entries[lease][:9]), "has no lease in force", nil,
		},
		"lease record": {
			remove(lease), "is counted as",
			func(e entries) { // the task is ready
				delete(e, lease)
				counted(func(c *keys.Counts) { c.Ready++; c.Leased-- })(e)
			},
		},
		"identity":             {set(string([]byte{keys.Meta}), "another one"), "identity", nil},
		"identity of no shard": {remove(string([]byte{keys.Meta})), "identity", nil},
		"task in two places": {
			set(string(keys.AppendScheduled(nil, 12346, f.later)), f.entries[string(keys.AppendScheduled(nil, 12345, f.later))]), "and at", nil,
		},
		"earlier place": { // than the place in the index
			set(string(keys.AppendScheduled(nil, 12344, f.later)), f.entries[string(keys.AppendScheduled(nil, 12345, f.later))]), "and at", nil,
		},
		"record": {
			set(string(done.AppendKey(nil, f.done)), "nonsense"), "",
			func(e entries) {
				delete(e, string(done.AppendKey(nil, f.done)))
				delete(e, string(keys.AppendBucket(nil, keys.Done, fixtureQueue, keys.Forever)))
				counted(func(c *keys.Counts) { c.Done-- })(e)
			},
		},
		"pins of a parent": {retained, "is kept for longer than its retention", func(e entries) {
			e[byID(keys.Pinned, f.done)] = string(keys.PinnedValue{Count: 1}.Append(nil))
			m := keys.Message{Kind: keys.MsgUnpin, Parent: f.done} // no child needs it
			e[string(keys.AppendOutbound(nil, 0, 1))] = string(m.Append(nil))
			e[numbered(keys.Sent, 0)] = string(keys.AppendNumber(nil, 1))
			retained(e)
		}},
		"settings": {
			set(string(append([]byte{keys.Settings}, "queue"...)), "\x00"), "settings refused",
			remove(string(append([]byte{keys.Settings}, "queue"...))),
		},
		"schedule": {set(string(keys.AppendSchedule(nil, "nightly")), ""), "schedule refused", remove(string(keys.AppendSchedule(nil, "nightly")))},
		"name of a queue": {
			remove(numbered(keys.Queue, fixtureQueue)), "",
			set(numbered(keys.Queue, fixtureQueue), "recovered-queue-3"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			damaged := maps.Clone(f.entries)
			c.damage(damaged)
			want := maps.Clone(f.entries)
			if c.want != nil {
				c.want(want)
			}
			disk := f.write(damaged)
			r, err := Verify(disk, "queue", testRules, false, false)
			require.NoError(t, err)
			require.NotEmpty(t, r.Problems)
			said := ""
			for _, p := range r.Problems {
				require.Zero(t, p.Shard)
				require.True(t, p.Repairable)
				require.False(t, p.Repaired)
				said += p.Text + "\n"
			}
			require.Contains(t, said, c.says)
			require.Equal(t, damaged, f.read(disk, "shard-000"))

			r, err = Verify(disk, "queue", testRules, true, false)
			require.NoError(t, err)
			if name == "name of a queue" { // the scopes of groups do not show the name
				require.Contains(t, r.Problems[len(r.Problems)-1].Text, "has scope")
			} else {
				for _, p := range r.Problems {
					require.True(t, p.Repaired, p.Text)
				}
			}
			require.Equal(t, "shard-000.damaged-1", r.Shards[0].Kept)
			require.Equal(t, damaged, f.read(disk, "shard-000.damaged-1"), "it is kept as it was")
			require.Equal(t, want, f.read(disk, "shard-000"))
			if name == "name of a queue" {
				return
			}
			r, err = Verify(disk, "queue", testRules, true, false)
			require.NoError(t, err)
			require.Empty(t, r.Problems)
			require.Empty(t, r.Shards[0].Kept)
		})
	}
}

// TestRebuildTies: a task counts two parents. One parent knows the task, and the end of the other
// one is in a message. The task does not wait for a third parent that has ended for it, and that a
// call has redriven since.
func TestRebuildTies(t *testing.T) {
	f := newFixture(t, "identity of the shard")
	redriven := &record.Record{}
	redriven.Parent = true
	f.put(f.later, keys.Place{Range: keys.Scheduled, At: 12345}, redriven)
	f.put(f.child, keys.Place{Range: keys.Blocked, Group: fixtureQueue}, &record.Record{
		Parents: [][record.IDLen]byte{f.later, f.parent, f.done}, OnDead: 2,
	})
	f.entries[string(keys.AppendByID(nil, keys.Pending, f.child))] = string(keys.AppendNumber(nil, 2))
	ended := keys.Message{Kind: keys.MsgEnded, Parent: f.done, Child: f.child}
	f.entries[string(keys.AppendOutbound(nil, 0, 1))] = string(ended.Append(nil))
	f.entries[string(keys.AppendNumbered(nil, keys.Sent, 0))] = string(keys.AppendNumber(nil, 1))
	r, err := Verify(f.write(f.entries), "queue", testRules, false, false)
	require.NoError(t, err)
	require.Empty(t, r.Problems)

	damaged := maps.Clone(f.entries)
	delete(damaged, string(keys.AppendNumbered(nil, keys.Counters, fixtureQueue)))
	disk := f.write(damaged)
	r, err = Verify(disk, "queue", testRules, true, false)
	require.NoError(t, err)
	require.Len(t, r.Problems, 1)
	require.True(t, r.Problems[0].Repaired)
	require.Equal(t, f.entries, f.read(disk, "shard-000"))
}

// TestVerifyReplica: a node has one shard, and its replica contradicts itself. Verify finds that,
// and repairs nothing.
func TestVerifyReplica(t *testing.T) {
	f := newFixture(t, "")
	f.entries[string([]byte{keys.Meta})] = manifest.ReplicaIdentity(manifest.Format, 0, 1)
	for _, sound := range []bool{true, false} {
		if !sound {
			delete(f.entries, string(keys.AppendDependent(nil, f.parent, f.child)))
		}
		disk := f.write(f.entries)
		stored := f.read(disk, "shard-000")
		d, err := manifest.Open(disk, "queue", manifest.Want{Shards: 1})
		require.NoError(t, err)
		d.Node = "node"
		require.NoError(t, errors.Join(d.Write(), d.Close()))
		log, err := raftlog.Open(disk.PathJoin("queue", manifest.RaftDir), raftlog.Options{FS: disk})
		require.NoError(t, err)
		require.NoError(t, log.Close())
		for _, repair := range []bool{false, true} {
			r, err := Verify(disk, "queue", testRules, repair, false)
			require.NoError(t, err)
			if sound {
				require.Empty(t, r.Problems)
				continue
			}
			require.Len(t, r.Problems, 1)
			require.Contains(t, r.Problems[0].Text, "and 0 know it")
			require.False(t, r.Problems[0].Repairable || r.Problems[0].Repaired)
			require.Equal(t, stored, f.read(disk, "shard-000"))
		}
	}
}
