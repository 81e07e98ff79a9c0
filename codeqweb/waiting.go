package codeqweb

import (
	"cmp"
	"slices"
	"time"

	"codeq"
)

// The tenants, groups and limit keys of waiting tasks: of the first tasks only, since a queue may
// have millions.

// waitingRead bounds the tasks that are read in each state.
const waitingRead = 1000

// waitingShown bounds the rows of each kind.
const waitingShown = 10

// waitingTasks has the tenants, groups and limit keys of waiting tasks, the longest wait first.
type waitingTasks struct {
	Tenants, Groups, Keys []waiters
	Read                  int
	All                   bool // all of them were read
}

// waiters are tasks that wait, and have a name in common.
type waiters struct {
	Name   string
	Tasks  int
	Oldest time.Time
	Weight int // of a tenant
}

// waiting reads ready and blocked tasks of a queue.
func (d *Dashboard) waiting(r *request, queue string, weights map[string]int) (w waitingTasks, err error) {
	tenants, groups, limited := make(map[string]*waiters), make(map[string]*waiters), make(map[string]*waiters)
	w.All = true
	for _, state := range []codeq.State{codeq.Ready, codeq.Blocked} {
		tasks, all, err := d.firstTasks(r, queue, state)
		if err != nil {
			return w, err
		}
		w.Read, w.All = w.Read+len(tasks), w.All && all
		for _, t := range tasks {
			note(tenants, t.Tenant, t.FirstReady)
			if t.Group != "" {
				note(groups, t.Group, t.FirstReady)
			}
			if t.LimitKey != "" {
				note(limited, t.LimitKey, t.FirstReady)
			}
		}
	}
	for name, of := range tenants {
		of.Weight = cmp.Or(weights[name], 1)
	}
	w.Tenants, w.Groups, w.Keys = longest(tenants), longest(groups), longest(limited)
	return w, nil
}

// firstTasks reads the first tasks of a queue in a state, as a request may see them. all: there are
// no more.
func (d *Dashboard) firstTasks(r *request, queue string, state codeq.State) (tasks []*codeq.TaskInfo, all bool, err error) {
	read, err := d.list(r, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{state}, Queue: queue}, NoPayload: true, Limit: waitingRead,
	})
	if err != nil {
		return nil, false, err
	}
	return read.Tasks, read.Next == "", nil
}

func note(in map[string]*waiters, name string, since time.Time) {
	of := in[name]
	if of == nil {
		of = &waiters{Name: name}
		in[name] = of
	}
	if of.Tasks++; !since.IsZero() && (of.Oldest.IsZero() || since.Before(of.Oldest)) {
		of.Oldest = since
	}
}

// longest returns those that wait longest.
func longest(in map[string]*waiters) []waiters {
	all := make([]waiters, 0, len(in))
	for _, of := range in {
		all = append(all, *of)
	}
	slices.SortFunc(all, func(a, b waiters) int {
		return cmp.Or(compareOldest(a.Oldest, b.Oldest), cmp.Compare(b.Tasks, a.Tasks), cmp.Compare(a.Name, b.Name))
	})
	return all[:min(len(all), waitingShown)]
}

// errorKind has tasks with errors of one kind.
type errorKind struct {
	Kind, Error string
	Tasks       int
	Example     codeq.ID
}

// retriedErrors groups the errors of tasks that wait for another attempt.
func (d *Dashboard) retriedErrors(r *request, queue string) ([]errorKind, error) {
	tasks, _, err := d.firstTasks(r, queue, codeq.Scheduled)
	if err != nil {
		return nil, err
	}
	kinds := make(map[string]*errorKind)
	for _, t := range tasks {
		if t.LastError == "" {
			continue
		}
		kind := codeq.ErrorKind(t.LastError)
		of := kinds[kind]
		if of == nil {
			of = &errorKind{Kind: kind, Error: t.LastError, Example: t.ID}
			kinds[kind] = of
		}
		of.Tasks++
	}
	var all []errorKind
	for _, of := range kinds {
		all = append(all, *of)
	}
	slices.SortFunc(all, func(a, b errorKind) int { return cmp.Or(cmp.Compare(b.Tasks, a.Tasks), cmp.Compare(a.Kind, b.Kind)) })
	return all[:min(len(all), waitingShown)], nil
}

// waitingTenants has the tenants of a queue with ready tasks or a weight.
type waitingTenants struct {
	Tenants []waitingTenant // by ready tasks, descending
	Read    int             // number of ready tasks read
	All     bool            // all ready tasks were read
}

type waitingTenant struct {
	Name   string
	Ready  int // among the tasks read
	Weight int
}

// tenants counts the ready tasks of a queue by tenant.
func (d *Dashboard) tenants(r *request, queue string, weights map[string]int) (t waitingTenants, err error) {
	ready, all, err := d.firstTasks(r, queue, codeq.Ready)
	if err != nil {
		return t, err
	}
	counts := make(map[string]int)
	for _, task := range ready {
		counts[task.Tenant]++
	}
	for name := range weights {
		counts[name] += 0
	}
	t = waitingTenants{Tenants: []waitingTenant{}, Read: len(ready), All: all}
	for name, n := range counts {
		t.Tenants = append(t.Tenants, waitingTenant{name, n, cmp.Or(weights[name], 1)})
	}
	slices.SortFunc(t.Tenants, func(a, b waitingTenant) int {
		return cmp.Or(cmp.Compare(b.Ready, a.Ready), cmp.Compare(a.Name, b.Name))
	})
	return t, nil
}
