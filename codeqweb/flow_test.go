package codeqweb_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"html"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// jsonFlow is the answer of api/v1/flow.
type jsonFlow struct {
	Nodes []struct {
		ID           codeq.ID
		State, Queue string
		Self         bool
		Count, Level int
		Waiting      int
	}
	Edges []struct {
		From, To int
		Calls    bool
	}
	States []struct {
		State string
		Count int
	}
	Tasks, Left, Levels int
	More                bool
}

func (s *site) flow(id codeq.ID) (f jsonFlow) {
	s.t.Helper()
	require.Equal(s.t, http.StatusOK, s.api(http.MethodGet, "flow?id="+id.String(), "", &f))
	return f
}

// fan produces a flow: one task, n that wait for it, and one that waits for all of these.
func (s *site) fan(n int) (first codeq.ID, middle []codeq.ID, last codeq.ID) {
	s.t.Helper()
	first = s.produce(codeq.Task{Queue: "split"})
	batch := make([]codeq.Task, n)
	for i := range batch {
		batch[i] = codeq.Task{Queue: "mail", After: []codeq.ID{first}}
	}
	middle, err := s.q.ProduceBatch(s.t.Context(), batch)
	require.NoError(s.t, err)
	return first, middle, s.produce(codeq.Task{Queue: "join", After: middle})
}

// TestFlow: a flow has all connected tasks, by level, also from its middle, with tasks that are
// gone, and counts the tasks of a change.
func TestFlow(t *testing.T) {
	s := open(t, codeq.Options{Shards: 2}, as(codeqweb.All))
	for _, queue := range []string{"mail", "join"} {
		require.NoError(t, s.q.Configure(t.Context(), queue, func(set *codeq.Settings) { set.Retention = time.Hour }))
	}
	first, middle, last := s.fan(3)
	s.produce(codeq.Task{Queue: "other"})
	for _, id := range []codeq.ID{first, middle[1], last} {
		f := s.flow(id)
		require.Equal(t, 5, f.Tasks)
		require.Equal(t, 3, f.Levels)
		require.Len(t, f.Nodes, 5)
		require.Len(t, f.Edges, 6)
		require.False(t, f.More)
		for _, n := range f.Nodes {
			require.Equal(t, n.ID == id, n.Self)
			require.Equal(t, map[string]int{"split": 0, "mail": 1, "join": 2}[n.Queue], n.Level)
			require.Equal(t, map[string]int{"split": 4, "mail": 1, "join": 0}[n.Queue], n.Waiting)
		}
	}
	page := html.UnescapeString(s.get("/flow?id=" + middle[1].String()))
	require.Contains(t, page, "Cancel this task for good? OK cancels it; the 4 blocked tasks that wait for it are canceled as well.")
	require.Contains(t, page, "Cancel this task for good? OK cancels it; the blocked task that waits for it is canceled as well.")
	require.Contains(t, page, "Cancel this task for good? OK cancels it; no other task is canceled.")
	require.Equal(t, "../flow?did=task%2Fcancel&id="+last.String(), strings.TrimPrefix(s.post("/task/cancel?id="+middle[0].String(), "back", "flow?id="+last.String()), "./"))
	f := s.flow(first) // a change of the dashboard is seen at once
	require.Equal(t, "ready blocked blocked canceled canceled", statesOf(f))

	// A parent that is not kept is shown as gone.
	parent := s.produce(codeq.Task{Queue: "p"})
	child := s.produce(codeq.Task{Queue: "c", After: []codeq.ID{parent}})
	require.NoError(t, s.q.Complete(t.Context(), s.claim("p").Receipt, nil))
	f = s.flow(child)
	require.Equal(t, "gone", f.Nodes[0].State)
	require.Equal(t, parent, f.Nodes[0].ID)
}

func statesOf(f jsonFlow) (text string) {
	var names []string
	for _, n := range f.Nodes {
		names = append(names, n.State)
	}
	return strings.Join(names, " ")
}

// TestFlowOfSteps: a task and the child of a step of it belong together, from both ends.
func TestFlowOfSteps(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.Read))
	id := s.produce(codeq.Task{Queue: "a"})
	s.work("w", "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
		_, err := codeq.Child[string](ctx, "charge", codeq.Task{Queue: "bank"})
		return err
	})
	require.Eventually(t, func() bool { return s.task(id).State == codeq.Scheduled }, time.Minute, time.Millisecond)
	f := s.flow(id)
	require.Equal(t, "scheduled ready", statesOf(f))
	require.True(t, f.Edges[0].Calls)
	require.Len(t, s.flow(f.Nodes[1].ID).Nodes, 2)
}

// TestFlowFolds: many tasks that are alike are one node; those that differ, and the one that was
// asked for, are nodes of their own.
func TestFlowFolds(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1, Retention: time.Hour}, as(codeqweb.All))
	first, middle, _ := s.fan(1000)
	f := s.flow(first)
	require.Len(t, f.Nodes, 3)
	require.Equal(t, 1000, f.Nodes[1].Count)
	require.NoError(t, s.q.Complete(t.Context(), s.claim("split").Receipt, nil))
	for range 30 {
		require.NoError(t, s.q.Complete(t.Context(), s.claim("mail").Receipt, nil))
	}
	require.NoError(t, s.q.DeadLetter(t.Context(), s.claim("mail").Receipt, nil))
	var counts []string
	f = s.flow(middle[500])
	for _, n := range f.Nodes {
		counts = append(counts, fmt.Sprint(n.Count, " ", n.State, " ", n.Queue))
	}
	require.ElementsMatch(t, []string{"1 done split", "30 done mail", "1 dead mail", "968 ready mail", "1 ready mail", "1 blocked join"}, counts)
	require.Equal(t, 1002, f.Tasks)
	page := s.get("/flow?id=" + middle[500].String())
	require.Contains(t, page, "968 ready, such as")
}

// TestFlowIsBounded: a flow of many different tasks is folded by level or, if it is deep, cut at
// the tasks that are far.
func TestFlowIsBounded(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	batch := []codeq.Task{{Queue: "root"}}
	for i := 0; i < 500; i++ { // chains of two
		batch = append(batch, codeq.Task{Queue: "a", After: []codeq.ID{codeq.Nth(0)}}, codeq.Task{Queue: fmt.Sprint("b", i%3), After: []codeq.ID{codeq.Nth(2*i + 1)}})
	}
	ids, err := s.q.ProduceBatch(t.Context(), batch)
	require.NoError(t, err)
	f := s.flow(ids[0])
	require.Len(t, f.Nodes, 5, "the root, and a node for each queue of a level")
	require.Len(t, f.Edges, 4)
	f = s.flow(ids[2])
	require.Len(t, f.Nodes, 7, "the task and its parent are single")

	batch = []codeq.Task{{Queue: "chain"}}
	for i := range 1000 {
		batch = append(batch, codeq.Task{Queue: "chain", After: []codeq.ID{codeq.Nth(i)}})
	}
	ids, err = s.q.ProduceBatch(t.Context(), batch)
	require.NoError(t, err)
	f = s.flow(ids[500])
	require.Len(t, f.Nodes, 300)
	require.Equal(t, 701, f.Left)
	require.Equal(t, 1001, f.Levels)
	require.True(t, f.Nodes[149].Self || f.Nodes[150].Self, "it is amid of what is near")
	require.Contains(t, s.get("/flow?id="+ids[500].String()), "701 tasks that are farther away")
}

// TestLargeFlow logs the cost of the page of a flow with 10,000 tasks.
func TestLargeFlow(t *testing.T) {
	s := open(t, codeq.Options{Shards: 2}, as(codeqweb.All))
	n := 9_998
	if testing.Short() {
		n = 998
	}
	first, _, last := s.fan(n)
	for _, id := range []codeq.ID{first, last} {
		for _, kind := range []string{"first", "again"} {
			begin := time.Now()
			page := s.get("/flow?id=" + id.String())
			t.Logf("%s: %v, %d bytes, %d packed", kind, time.Since(begin), len(page), packedSize(t, page))
			require.Less(t, packedSize(t, page), 60_000)
		}
		f := s.flow(id)
		require.Equal(t, n+2, f.Tasks)
		require.Len(t, f.Nodes, 3)
		require.False(t, f.More)
	}
}

// TestWideFlow logs the size of a page with as many nodes as there may be.
func TestWideFlow(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	batch := []codeq.Task{{Queue: "root"}}
	for i := range 299 {
		batch = append(batch, codeq.Task{Queue: fmt.Sprint("queue-", i), Kind: "a kind", After: []codeq.ID{codeq.Nth(i / 3)}})
	}
	ids, err := s.q.ProduceBatch(t.Context(), batch)
	require.NoError(t, err)
	page := s.get("/flow?id=" + ids[0].String())
	require.Equal(t, 300, strings.Count(page, `<tr id="node-`))
	t.Logf("%d bytes, %d packed", len(page), packedSize(t, page))
	require.Less(t, packedSize(t, page), 60_000)
}

func packedSize(t *testing.T, page string) int {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	require.NoError(t, err)
	_, err = w.Write([]byte(page))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Len()
}
