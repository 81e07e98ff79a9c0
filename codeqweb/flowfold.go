package codeqweb

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"

	"codeq"
)

// The bounds of a shown flow.
const (
	flowAlike = 20  // so many tasks that are alike stay single
	flowNodes = 300 // on a page
	flowEdges = 900
)

// flow is a flow as it is shown: tasks that are alike are one node.
type flow struct {
	Nodes  []flowNode // by level
	Edges  []flowLink
	States []stateCount // of all its tasks
	Tasks  int
	Left   int  // tasks that are in no node: they are far from the one that was asked for
	Levels int  // the number of levels
	More   bool // not all tasks were looked at
	At     time.Time
}

// flowNode is a task, or several in the same state.
type flowNode struct {
	flowTask      // the first of them
	Self     bool `json:",omitzero"` // the one that was asked for
	Count    int
	Level    int // 0: it waits for none
	Waiting  int // blocked tasks that wait for it, also for tasks that wait for it; of a single task
}

// flowLink is a flowEdge between nodes, by their indexes.
type flowLink flowEdge

type stateCount struct {
	State string
	Count int
}

// flowGraph is a walked flow while it is folded.
type flowGraph struct {
	tasks         []flowTask
	edges         []flowEdge
	parents, kids [][]int // by task, sorted; kids are those that wait
	level         []int
	distance      []int // from the first task, over edges in both directions
}

// fold makes the shown form of a flow.
func (w *flowWalk) fold() *flow {
	g := newFlowGraph(w)
	f := &flow{Tasks: len(g.tasks), More: w.more, Levels: slices.Max(g.level) + 1, At: time.Now().UTC(), States: g.states()}
	near := 0
	for _, d := range g.distance {
		if d <= 1 {
			near++
		}
	}
	single := func(i int) bool { return i == 0 || g.distance[i] <= 1 && near <= flowAlike }
	for _, rule := range []struct {
		least int                            // from so many on
		key   func(key []byte, i int) []byte // tasks with the same one are a node
	}{
		{flowAlike + 1, func(key []byte, i int) []byte {
			for _, ends := range [][]int{g.parents[i], {-1}, g.kids[i]} {
				for _, end := range ends {
					key = binary.AppendVarint(key, int64(end))
				}
			}
			return key
		}},
		{2, func(key []byte, i int) []byte {
			return binary.AppendVarint(append(key, g.tasks[i].Queue...), int64(g.level[i]))
		}},
		{2, func(key []byte, i int) []byte { return binary.AppendVarint(key, int64(g.level[i])) }},
	} {
		groups := make(map[string][]int)
		for i := range g.tasks {
			t := &g.tasks[i]
			key := append([]byte(t.State), 0)
			if rule.least > flowAlike {
				key = append(append(append(append(key, t.Queue...), 0), t.Kind...), 0)
			}
			if single(i) {
				key = binary.AppendVarint([]byte("single"), int64(i))
			} else {
				key = rule.key(key, i)
			}
			groups[string(key)] = append(groups[string(key)], i)
		}
		g.show(f, groups, rule.least)
		if len(f.Nodes) <= flowNodes && len(f.Edges) <= flowEdges {
			break
		}
	}
	g.cut(f)
	return f
}

func newFlowGraph(w *flowWalk) *flowGraph {
	n := len(w.tasks)
	g := &flowGraph{tasks: w.tasks, edges: w.edges, parents: make([][]int, n), kids: make([][]int, n), level: make([]int, n), distance: make([]int, n)}
	slices.SortFunc(g.edges, func(a, b flowEdge) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To)) })
	next, before := make([][]int, n), make([]int, n)
	for _, e := range g.edges {
		g.parents[e.To] = append(g.parents[e.To], e.From)
		if next[e.From] = append(next[e.From], e.To); !e.Calls {
			g.kids[e.From] = append(g.kids[e.From], e.To)
		}
		before[e.To]++
	}
	var order []int
	for i := range n {
		if g.distance[i] = n; before[i] == 0 {
			order = append(order, i)
		}
	}
	for at := 0; at < len(order); at++ { // tasks in a circle, as of hostile keys, keep their levels
		for _, to := range next[order[at]] {
			g.level[to] = max(g.level[to], g.level[order[at]]+1)
			if before[to]--; before[to] == 0 {
				order = append(order, to)
			}
		}
	}
	g.distance[0] = 0
	for reached := []int{0}; len(reached) > 0; reached = reached[1:] {
		i := reached[0]
		for _, ends := range [][]int{g.parents[i], next[i]} {
			for _, j := range ends {
				if g.distance[j] == n {
					g.distance[j] = g.distance[i] + 1
					reached = append(reached, j)
				}
			}
		}
	}
	return g
}

// states counts the tasks by state, in the order of the tabs.
func (g *flowGraph) states() (counts []stateCount) {
	of := make(map[string]int)
	for i := range g.tasks {
		of[g.tasks[i].State]++
	}
	for _, s := range states {
		if n := of[s.String()]; n > 0 {
			counts = append(counts, stateCount{s.String(), n})
		}
	}
	for _, s := range []string{"gone", "unread"} {
		if n := of[s]; n > 0 {
			counts = append(counts, stateCount{s, n})
		}
	}
	return counts
}

// show makes a node of each group with at least so many tasks, and of each other task.
func (g *flowGraph) show(f *flow, groups map[string][]int, least int) {
	var members [][]int
	for _, of := range groups {
		if len(of) >= least {
			members = append(members, of)
			continue
		}
		for _, i := range of {
			members = append(members, []int{i})
		}
	}
	slices.SortFunc(members, func(a, b []int) int {
		return cmp.Or(cmp.Compare(g.level[a[0]], g.level[b[0]]), cmp.Compare(a[0], b[0]))
	})
	f.Nodes, f.Edges = nil, nil
	nodes := make([]int, len(g.tasks))
	for at, of := range members {
		for _, i := range of {
			nodes[i] = at
		}
		f.Nodes = append(f.Nodes, flowNode{flowTask: g.tasks[of[0]], Self: of[0] == 0, Count: len(of), Level: g.level[of[0]]})
	}
	linked := make(map[flowLink]bool)
	for _, e := range g.edges {
		l := flowLink{nodes[e.From], nodes[e.To], e.Calls}
		if l.From != l.To && !linked[l] {
			linked[l] = true
			f.Edges = append(f.Edges, l)
		}
	}
}

// cut leaves out the nodes that are far from the first task, if there are too many, and counts the
// tasks that wait for each of the others.
func (g *flowGraph) cut(f *flow) {
	index := make(map[codeq.ID]int, len(f.Nodes))
	for i := range g.tasks {
		index[g.tasks[i].ID] = i
	}
	far := make([]int, 0, len(f.Nodes)) // nodes, the nearest first
	for at := range f.Nodes {
		far = append(far, at)
	}
	of := func(at int) int { return index[f.Nodes[at].ID] }
	slices.SortStableFunc(far, func(a, b int) int { return cmp.Compare(g.distance[of(a)], g.distance[of(b)]) })
	kept := far[:min(len(far), flowNodes)]
	slices.Sort(kept)
	places := make(map[int]int, len(kept))
	var nodes []flowNode
	seen := make([]int, len(g.tasks)) // the number of the node, plus 1
	for place, at := range kept {
		n := f.Nodes[at]
		if places[at] = place; n.Count == 1 && n.State != "done" && n.State != "canceled" {
			n.Waiting = g.waiting(of(at), place+1, seen)
		}
		nodes = append(nodes, n)
		f.Left -= n.Count
	}
	f.Nodes, f.Left = nodes, f.Left+f.Tasks
	var edges []flowLink
	for _, l := range f.Edges {
		from, ok := places[l.From]
		if to, too := places[l.To]; ok && too && len(edges) < flowEdges {
			edges = append(edges, flowLink{from, to, l.Calls})
		}
	}
	f.Edges = edges
}

// waiting counts the blocked tasks after a task.
func (g *flowGraph) waiting(i, mark int, seen []int) (count int) {
	for rest := []int{i}; len(rest) > 0; {
		last := rest[len(rest)-1]
		rest = rest[:len(rest)-1]
		for _, kid := range g.kids[last] {
			if seen[kid] != mark && g.tasks[kid].State == "blocked" {
				seen[kid] = mark
				count++
				rest = append(rest, kid)
			}
		}
	}
	return count
}
