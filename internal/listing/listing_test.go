package listing

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// listed is a task as these tests show it.
type listed struct {
	Name string
	Key
}

func newReader(q Query) *Reader[listed] {
	return NewReader(q, func(*store.Task) *listed { return nil })
}

func item(name string, k Key, at uint64) Item[listed] {
	return Item[listed]{Task: &listed{name, k}, At: at}
}

// TestMerge: the pages of shards become one list in the order of the state. Each page of a shard is
// fetched after the one before it is used up.
func TestMerge(t *testing.T) {
	for state, want := range map[engine.TaskState]string{
		engine.Ready:     "[urgent early late tenant other]", // queue, priority, tenant, time
		engine.Leased:    "[urgent early late tenant other]",
		engine.Scheduled: "[other tenant early urgent late]", // time
		engine.Blocked:   "[tenant early urgent late other]", // queue, time
		engine.Dead:      "[tenant early urgent late other]",
		engine.Done:      "[tenant early urgent late other]",
		engine.Canceled:  "[tenant early urgent late other]",
	} {
		all := []Item[listed]{
			item("late", Key{Queue: "a", ID: keys.ID{9}}, 4),
			item("early", Key{Queue: "a", ID: keys.ID{1}}, 3),
			item("urgent", Key{Queue: "a", Priority: 5, ID: keys.ID{2}}, 3), // of equal times, by ID
			item("tenant", Key{Queue: "a", Tenant: "t", ID: keys.ID{3}}, 2),
			item("other", Key{Queue: "b", Priority: 9, ID: keys.ID{4}}, 1),
		}
		slices.SortFunc(all, func(a, b Item[listed]) int {
			q := Query{State: state}
			return q.compare(&Position{Key: a.Task.Key, At: a.At}, &Position{Key: b.Task.Key, At: b.At})
		})
		for split := range 1 << len(all) { // over two shards
			heads := []*Reader[listed]{newReader(Query{State: state}), newReader(Query{State: state})}
			left := make([][]Item[listed], 2)
			for i, it := range all {
				left[split>>i&1] = append(left[split>>i&1], it)
			}
			var got []string
			require.NoError(t, Merge(heads, func(l *listed) Key { return l.Key }, func(shard int, l *Reader[listed]) error {
				require.Same(t, heads[shard], l)
				require.Empty(t, l.Page)
				l.Page, left[shard] = left[shard][:min(1, len(left[shard]))], left[shard][min(1, len(left[shard])):]
				l.begun = len(left[shard]) == 0
				return nil
			}, func(l *listed) bool { got = append(got, l.Name); return true }))
			require.Equal(t, want, fmt.Sprint(got), "%d, split %b", state, split)
		}
	}
}

// TestMergeEnds: Merge ends with the error of a shard, or when the caller stops it.
func TestMergeEnds(t *testing.T) {
	broken := errors.New("broken")
	fetched, yielded := 0, 0
	fetch := func(_ int, l *Reader[listed]) error {
		if fetched++; fetched == 3 {
			return broken
		}
		l.Page = []Item[listed]{item("", Key{}, 1)}
		return nil
	}
	key := func(l *listed) Key { return l.Key }
	require.ErrorIs(t, Merge([]*Reader[listed]{newReader(Query{State: engine.Ready})}, key, fetch, func(*listed) bool { yielded++; return true }), broken)
	require.Equal(t, 2, yielded)
	fetched = 0
	require.NoError(t, Merge([]*Reader[listed]{newReader(Query{State: engine.Ready})}, key, fetch, func(*listed) bool { return false }))
	require.Equal(t, 1, fetched)
}

// TestTravel: a Reader goes on at the leader of its shard, with only the spans for one page. When
// the page is back, the Reader still has the spans after it.
func TestTravel(t *testing.T) {
	l := newReader(Query{State: engine.Dead, Queue: "q", Tenants: []string{"x", ""}, From: time.Unix(3, 4), To: time.Unix(5, 6)})
	l.begun, l.left = true, 7
	for i := range spanCap + 2 {
		l.spans = append(l.spans, span{[]byte{byte(i >> 8), byte(i)}, []byte("end")})
	}
	later := slices.Clone(l.spans[spanCap:])
	there, r := newReader(Query{}), wire.NewReader(l.Append(nil))
	there.Read(r)
	require.NoError(t, r.Done())
	require.Equal(t, l.Query, there.Query)
	require.Equal(t, l.spans[:spanCap], there.spans)
	require.True(t, there.begun)
	require.Equal(t, 7, there.left)

	there.spans, there.left = there.spans[spanCap-1:], 0
	there.found = []engine.LeasedTask{{
		Lane: engine.LaneRef{Number: 8, LaneKey: engine.LaneKey{Queue: "q", Tenant: "t", Priority: 3}}, Since: 9, ID: keys.ID{10},
	}}
	there.Page = []Item[listed]{item("name", Key{Queue: "q", ID: keys.ID{1}}, math.MaxUint64)}
	page := there.AppendReply(nil)
	r = wire.NewReader(page)
	l.ReadReply(r)
	require.NoError(t, r.Done())
	require.Equal(t, there.Page, l.Page)
	require.Equal(t, there.found, l.found)
	require.Equal(t, append(there.spans, later...), l.spans)
	require.Zero(t, l.left)

	l.show = nil // functions are not equal
	before := *l
	for n := range page { // a truncated page changes nothing
		r := wire.NewReader(page[:n])
		l.ReadReply(r)
		require.Error(t, r.Done())
		require.Equal(t, before, *l)
	}
	r = wire.NewReader(newReader(Query{State: 99}).Append(nil))
	newReader(Query{}).Read(r)
	require.Error(t, r.Done(), "a state that does not exist")
}

// TestSurveyWaits: the survey of the next part of the leases waits until the caller has read this
// part.
func TestSurveyWaits(t *testing.T) {
	l := newReader(Query{State: engine.Leased})
	last := &Position{Key: Key{Queue: "q", ID: keys.ID{9}}, At: 9}
	l.begun, l.order, l.rest, l.last = true, true, true, last
	l.spans = []span{{from: []byte("first")}}
	l.found = []engine.LeasedTask{{ID: keys.ID{8}}}
	for _, left := range []int{1, 0} {
		there, r := newReader(Query{}), wire.NewReader(l.Append(nil))
		there.Read(r)
		require.NoError(t, r.Done())
		there.read = len(there.spans)
		there.advance()
		require.Equal(t, left == 1, there.begun)
		r = wire.NewReader(there.AppendReply(nil))
		l.ReadReply(r)
		require.NoError(t, r.Done())
		require.Len(t, l.found, left)
		l.prepare()
	}
	require.False(t, l.begun)
	require.Equal(t, last, l.After)
}

// TestPrepare: leases become spans in their order, each once. Each step makes as many as a page has
// tasks.
func TestPrepare(t *testing.T) {
	l := newReader(Query{State: engine.Leased})
	l.begun = true
	lane := func(queue string, priority uint8, n uint32) engine.LaneRef {
		return engine.LaneRef{Number: n, LaneKey: engine.LaneKey{Queue: queue, Priority: priority}}
	}
	var want [][]byte
	for _, ln := range []engine.LaneRef{lane("a", 9, 3), lane("a", 1, 1), lane("b", 5, 2)} {
		for since := range uint64(PageTasks) {
			l.found = slices.Insert(l.found, 0, engine.LeasedTask{Lane: ln, Since: since, ID: keys.ID{1}}, engine.LeasedTask{Lane: ln, Since: since, ID: keys.ID{1}})
			want = append(want, keys.AppendTask(nil, ln.Number, since, keys.ID{1}))
		}
	}
	var got [][]byte
	for l.More() {
		l.prepare()
		require.Len(t, l.spans, PageTasks)
		for _, sp := range l.spans {
			got = append(got, sp.from)
			require.Empty(t, sp.to)
		}
		l.read = len(l.spans)
		l.advance()
	}
	require.Equal(t, want, got)
}
