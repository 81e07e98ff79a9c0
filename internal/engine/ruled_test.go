package engine

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// ruled is one shard under the rules, for tests of the effects of a State beside its answers.
type ruled struct {
	driver
	*testing.T
	*drivenShard
	commits int
}

func newRuled(t *testing.T, c Config) *ruled {
	shared := store.NewCaches(8<<20, 1<<20, 8)
	c.Shards, c.MaxAttempts = cmp.Or(c.Shards, 1), cmp.Or(c.MaxAttempts, 3)
	c.WindowTasks, c.WindowBytes = cmp.Or(c.WindowTasks, 4096), cmp.Or(c.WindowBytes, 32<<20)
	c.IdleLanes, c.SweepLanes, c.GroupBytes, c.TrimBytes, c.TrimLane = cmp.Or(c.IdleLanes, IdleLanes), SweepLanes, GroupBytes, TrimBytes, TrimLane
	c.Backoff = func(int, float64) time.Duration { return 0 }
	r := &ruled{T: t}
	r.driver = driver{
		t: t, shared: shared, config: c, tenants: make(countedTenants), Instant: Instant{Wall: storyStart},
		sealing: func(*drivenShard) {}, persisted: func(*drivenShard) { r.commits++ }, kept: func(*drivenShard, []upkeepDone) {},
		forgotten: func(*Queue) {}, clockAge: func(int) uint64 { return 0 },
	}
	r.driver.open()
	r.drivenShard = r.shards[0]
	t.Cleanup(func() {
		r.driver.close()
		shared.Close()
	})
	return r
}

// reopen loads the stored data.
func (r *ruled) reopen() {
	require.False(r, r.under)
	r.driver.crash()
	r.drivenShard = r.shards[0]
}

// pass moves all clocks.
func (r *ruled) pass(d time.Duration) {
	require.False(r, r.under)
	ms := uint64(d / time.Millisecond)
	r.driver.Wall, r.driver.Now, r.driver.Uptime = r.driver.Wall+ms, r.driver.Now+ms, r.driver.Uptime+ms
}

// in decides something in the group. It begins a group if none is under way.
func (r *ruled) in(decide func() (Verdict, error)) {
	r.Helper()
	for {
		r.begin(r.drivenShard)
		v, err := decide()
		require.NoError(r, err)
		if v == Decided {
			return
		}
		require.Equal(r, Again, v)
		r.end()
	}
}

// end commits the group.
func (r *ruled) end() { r.commit(r.drivenShard) }

// settle ends the group, does the due work, delivers the shard's messages to itself, and checks the
// shard.
func (r *ruled) settle() {
	r.Helper()
	for more := true; more; {
		if r.under {
			r.end()
		}
		more = r.keepUp(r.drivenShard) > 0
		r.take(r.drivenShard, func(int, *delivery, int) {})
		r.confirm(r.drivenShard)
		more = more || r.under
	}
	require.True(r, r.isAtRest())
	require.NoError(r, r.check(r.drivenShard))
}

// stored counts the entries in a range.
func (r *ruled) stored(prefix byte) (n int) {
	require.NoError(r, store.Scan(r.Store.DB(), prefix, func(_, _ []byte) error {
		n++
		return nil
	}))
	return n
}

// find returns a stored task.
func (r *ruled) find(id keys.ID) *located {
	r.Helper()
	r.begin(r.drivenShard)
	at, err := r.locate(id)
	require.NoError(r, err)
	require.NotNil(r, at)
	r.end()
	return at
}

// add produces tasks in the group and returns their IDs.
func (r *ruled) add(tasks ...NewTask) (ids []keys.ID) {
	r.Helper()
	markTwins(tasks)
	r.in(func() (Verdict, error) {
		var out Produced
		v, err := r.Produce(tasks, new(keys.CallNumber), &out)
		ids = out.IDs
		return v, err
	})
	return ids
}

// produce produces tasks in a group of their own.
func (r *ruled) produce(tasks ...NewTask) []keys.ID {
	r.Helper()
	ids := r.add(tasks...)
	r.end()
	return ids
}

// produceFor produces one task for each tenant, again and again until each has so many.
func (r *ruled) produceFor(queue string, payload, each int, tenants ...string) {
	r.Helper()
	var batch []NewTask
	flush := func() {
		r.begin(r.drivenShard)
		_, err := r.Produce(batch, new(keys.CallNumber), new(Produced))
		require.NoError(r, err)
		r.end()
		batch = batch[:0]
	}
	for range each {
		for _, tenant := range tenants {
			if batch = append(batch, newTask(LaneKey{Queue: queue, Tenant: tenant}, record.Record{Payload: make([]byte, payload)})); len(batch) == 5000 {
				flush()
			}
		}
	}
	flush()
}

func newTask(key LaneKey, rec record.Record) NewTask {
	tie(&key, &rec)
	t := NewTask{Key: key}
	t.Encode(&rec, nil)
	return t
}

// claim claims up to so many tasks of a queue. Like an owner's claim, it waits for a refill only if
// it has no task yet.
func (r *ruled) claim(queue string, most int) (grants []Grant) {
	r.Helper()
	for q := r.Names.Queues[queue]; q != nil && len(grants) < most; {
		r.begin(r.drivenShard)
		l, pending := r.Next(q, 0)
		if l != nil {
			var err error
			grants, err = r.Grant(l, 30_000, Holder{}, grants)
			require.NoError(r, err)
			continue
		}
		if !pending || len(grants) > 0 {
			break
		}
		r.end()
	}
	if r.under {
		r.end()
	}
	return grants
}

// tenantsOf are the tenants of the next claims, in their order.
func (r *ruled) tenantsOf(queue string, claims int) string {
	r.Helper()
	var b strings.Builder
	for range claims {
		grants := r.claim(queue, 1)
		require.Len(r, grants, 1)
		b.WriteString(grants[0].Tenant)
	}
	return b.String()
}

// complete completes tasks in a group.
func (r *ruled) complete(grants ...Grant) {
	r.Helper()
	for i := range grants {
		r.in(func() (Verdict, error) { return r.Complete(grants[i].Receipt, nil, 0, nil, false) })
	}
	r.end()
}

// countsOf returns the counts of a queue.
func (r *ruled) countsOf(queue string) keys.Counts {
	_, c := r.Names.CountsOf(queue)
	return c
}

// namesOf are so many names, in the order of their numbers.
func namesOf(prefix string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s %05d", prefix, i)
	}
	return all
}

// configure sets a queue for the first time.
func (r *ruled) configure(queue, settings string) {
	r.Helper()
	r.in(func() (Verdict, error) {
		_, err := r.Configure(queue, keys.SettingsValue{Version: 1, JSON: []byte(settings)}.Append(nil))
		return Decided, err
	})
	r.end()
}
