package codeqweb

import (
	"context"
	"errors"
	"slices"

	"codeq"
)

// The bounds of a listed family.
const (
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
}

// IsLong reports whether the list is folded.
func (f family) IsLong() bool { return len(f.Parents)+len(f.Children) > 12 }

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

// foundChildren is the result of a search for children; after one that has failed, only that there
// may be more.
type foundChildren struct {
	children []relative
	more     bool // there may be more
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
		f.Parents = append(f.Parents, d.relativeOf(id, parent))
	}
	switch t.State {
	case codeq.Done, codeq.Canceled: // no child waits for it
	default:
		found, err := d.kin.of(ctx, t.ID, func(ctx context.Context) (foundChildren, error) {
			c, err := d.children(ctx, t.ID)
			if err != nil {
				return foundChildren{more: true}, err
			}
			found := foundChildren{more: c.More}
			for _, t := range c.Tasks {
				found.children = append(found.children, d.relativeOf(t.ID, t))
			}
			return found, nil
		})
		if err != nil {
			return f, err
		}
		f.Children, f.MoreChildren = found.children, found.more
	}
	return f, nil
}

// relativeOf returns a task as it is shown; nil: it is gone.
func (d *Dashboard) relativeOf(id codeq.ID, t *codeq.TaskInfo) relative {
	if t == nil {
		return relative{ID: id, Gone: true, State: "gone"}
	}
	c := *t
	d.redact(&c)
	return relative{ID: id, State: t.State.String(), Queue: c.Queue}
}
