package codeqweb

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"codeq"
)

// The bounds of a drawn and listed family.
const (
	familyDrawn  = 12     // at most so many parents, and children
	parentsRead  = 100    // of Task.After
	childrenRead = 10_000 // blocked tasks that are read to find children
	childrenMax  = 100
)

// relative is a parent or a child of a task.
type relative struct {
	ID    codeq.ID
	Gone  bool // ended and removed
	State string
	Queue string
}

// family has the parents and the live children of a task.
type family struct {
	Parents, Children []relative
	MoreParents       int  // not in Parents
	MoreChildren      bool // not all blocked tasks were read, or there are too many children
	Drawing           *drawing
}

// drawing is the graph of a family: boxes in three columns, and lines between them.
type drawing struct {
	Width, Height int
	Boxes         []box
	Edges         []edge
}

type box struct {
	X, Y, Width, Height int
	URL                 string // "": the task itself
	Line1, Line2        string
	State, Title        string
}

type edge struct{ X1, Y1, X2, Y2 int }

// childList is the result of a search for children.
type childList struct {
	Tasks   []*codeq.TaskInfo
	Scanned int
	More    bool
}

// children finds the tasks that wait for a task. There is no index: it reads blocked tasks, up to a
// bound.
func (d *Dashboard) children(ctx context.Context, id codeq.ID) (*childList, error) {
	c := new(childList)
	opts := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Blocked}}, NoPayload: true, Limit: codeq.MaxPage}
	for {
		tasks, err := d.q.ListPage(ctx, opts)
		if err != nil {
			return nil, err
		}
		c.Scanned += tasks.Scanned
		for _, t := range tasks.Tasks {
			if !slices.Contains(t.After, id) {
				continue
			}
			if len(c.Tasks) == childrenMax {
				c.More = true
				return c, nil
			}
			c.Tasks = append(c.Tasks, t)
		}
		if opts.Cursor = tasks.Next; opts.Cursor == "" {
			return c, nil
		}
		if c.Scanned >= childrenRead {
			c.More = true
			return c, nil
		}
	}
}

// childCache caches children for childrenPause times the duration of their search, so that an open
// page spends a fiftieth of the time in searches at most. One search runs at a time.
type childCache struct {
	searching chan struct{} // capacity 1: held during a search

	mu    sync.Mutex // guards found
	found map[codeq.ID]foundChildren
}

// foundChildren is the result of a search: empty, if it has failed.
type foundChildren struct {
	children []relative
	more     bool // there may be more
	until    time.Time
}

const (
	childrenKept  = 100 // tasks
	childrenPause = 50  // times the duration of the search
)

func newChildCache() childCache { return childCache{searching: make(chan struct{}, 1)} }

// of returns the children of a task, from the cache or by find.
func (c *childCache) of(ctx context.Context, id codeq.ID, find func() (*childList, error)) (children []relative, more bool, err error) {
	if known, ok := c.known(id); ok {
		return known.children, known.more, nil
	}
	select {
	case c.searching <- struct{}{}:
		defer func() { <-c.searching }()
	case <-ctx.Done():
		return nil, false, context.Cause(ctx)
	}
	if known, ok := c.known(id); ok { // by the previous search
		return known.children, known.more, nil
	}
	begin := time.Now()
	list, err := find()
	found := foundChildren{more: true}
	if err == nil {
		found.more = list.More
		for _, t := range list.Tasks {
			found.children = append(found.children, relativeOf(t.ID, t))
		}
	}
	found.until = time.Now().Add(childrenPause * time.Since(begin))
	c.keep(id, found)
	return found.children, found.more, err
}

func (c *childCache) known(id codeq.ID) (found foundChildren, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found = c.found[id]
	return found, time.Now().Before(found.until)
}

func (c *childCache) keep(id codeq.ID, found foundChildren) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.found, func(_ codeq.ID, f foundChildren) bool { return !now.Before(f.until) })
	if c.found == nil {
		c.found = make(map[codeq.ID]foundChildren)
	}
	if len(c.found) < childrenKept {
		c.found[id] = found
	}
}

// family finds the parents and children of a task.
func (d *Dashboard) family(ctx context.Context, t *codeq.TaskInfo) (f family, err error) {
	for i, id := range t.After {
		if i == parentsRead {
			f.MoreParents = len(t.After) - parentsRead
			break
		}
		parent, err := d.q.Get(ctx, id)
		if err != nil && !errors.Is(err, codeq.ErrNotFound) {
			return f, err
		}
		f.Parents = append(f.Parents, relativeOf(id, parent))
	}
	switch t.State {
	case codeq.Done, codeq.Canceled: // no child waits for it
	default:
		f.Children, f.MoreChildren, err = d.kin.of(ctx, t.ID, func() (*childList, error) { return d.children(ctx, t.ID) })
		if err != nil {
			return f, err
		}
	}
	if len(f.Parents)+len(f.Children) > 0 {
		f.Drawing = draw(t, f)
	}
	return f, nil
}

func relativeOf(id codeq.ID, t *codeq.TaskInfo) relative {
	if t == nil {
		return relative{ID: id, Gone: true, State: "gone"}
	}
	return relative{ID: id, State: t.State.String(), Queue: t.Queue}
}

// draw draws a family: parents at the left, children at the right.
func draw(t *codeq.TaskInfo, f family) *drawing {
	const width, height, gap, column = 200, 40, 12, 260
	parents, children := f.Parents[:min(len(f.Parents), familyDrawn)], f.Children[:min(len(f.Children), familyDrawn)]
	rows := max(len(parents), len(children), 1)
	g := &drawing{Width: 2*column + width + 2, Height: rows*(height+gap) - gap + 2}
	top := func(i, of int) int { return 1 + (g.Height-2-(of*(height+gap)-gap))/2 + i*(height+gap) }
	put := func(r relative, col, i, of int, link string) box {
		b := box{
			X: 1 + col*column, Y: top(i, of), Width: width, Height: height, URL: link, State: r.State,
			Line1: clip(visible(r.Queue), 20), Line2: "…" + r.ID.String()[24:] + " " + r.State, Title: r.Queue + " " + r.ID.String() + " " + r.State,
		}
		if r.Gone {
			b.Line1 = "not kept"
		}
		g.Boxes = append(g.Boxes, b)
		return b
	}
	self := put(relativeOf(t.ID, t), 1, 0, 1, "")
	for i, r := range parents {
		b := put(r, 0, i, len(parents), link("task", "id", r.ID))
		g.Edges = append(g.Edges, edge{b.X + width, b.Y + height/2, self.X, self.Y + height/2})
	}
	for i, r := range children {
		b := put(r, 2, i, len(children), link("task", "id", r.ID))
		g.Edges = append(g.Edges, edge{self.X + width, self.Y + height/2, b.X, b.Y + height/2})
	}
	return g
}
