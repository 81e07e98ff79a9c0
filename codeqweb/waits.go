package codeqweb

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"codeq"
)

// asked bounds the tasks that one question about a task reads.
const asked = 100

// waits says why a task does not run, or how it has ended. Each question to the queue is bounded;
// where the answer would cost more, it says less.
type waits struct {
	d        *Dashboard
	ctx      context.Context
	stored   *codeq.TaskInfo // for questions
	t        *codeq.TaskInfo // as it is shown
	family   family
	settings codeq.Settings // zero if they are not known
	sample   *sample        // nil if it is not known
	row      row            // of the queue
	now      time.Time
}

// why returns the sentences about a task.
func (d *Dashboard) why(ctx context.Context, stored, shown *codeq.TaskInfo, f family) (all []sentence) {
	w := &waits{d: d, ctx: ctx, stored: stored, t: shown, family: f, now: time.Now()}
	w.settings, _ = d.q.Settings(stored.Queue)
	if w.sample, _ = d.sampler.fresh(ctx, time.Second); w.sample != nil {
		if r := w.sample.row(stored.Queue); r != nil {
			w.row = *r
		}
	}
	switch stored.State {
	case codeq.Scheduled:
		all = w.scheduled()
	case codeq.Blocked:
		all = w.blocked()
	case codeq.Ready:
		all = w.ready()
	case codeq.Leased:
		all = w.leased()
	case codeq.Dead, codeq.Done, codeq.Canceled:
		all = w.ended()
	}
	return append(append(all, w.hung()...), w.belongs()...)
}

// apiWhy says why a task does not run, or how it has ended.
func (d *Dashboard) apiWhy(ctx context.Context, r *request) (any, error) {
	stored, shown, err := d.stored(r)
	if err != nil {
		return nil, err
	}
	f, err := d.family(ctx, stored)
	if err != nil {
		return nil, err
	}
	why := []string{}
	for _, s := range d.why(ctx, stored, shown, f) {
		why = append(why, s.String())
	}
	return struct{ Why []string }{why}, nil
}

// last returns the last attempt, the zero one if there is none.
func last(t *codeq.TaskInfo) (a codeq.Attempt) {
	if n := len(t.History); n > 0 {
		a = t.History[n-1]
	}
	return a
}

// count is a number with its noun.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return number(n) + " " + many
}

// tried tells how often the task was tried.
func (w *waits) tried() string {
	if of := cmp.Or(w.t.MaxAttempts, w.settings.MaxAttempts); of > 0 {
		return fmt.Sprintf("attempt %d of %d", w.t.Attempts, of)
	}
	return fmt.Sprint("attempt ", w.t.Attempts)
}

// failure is the beginning of an error, in a sentence.
func failure(text string) sentence {
	if text == "" {
		return nil
	}
	return say(": ", name(text))
}

func (w *waits) scheduled() []sentence {
	then := func(verb string) sentence {
		if w.t.At.After(w.now) {
			return say("; it "+verb+" ", w.t.At, ".")
		}
		return say("; it was due ", w.t.At, ".")
	}
	a := last(w.t)
	if n := len(w.t.Steps); n > 0 && a.Outcome == codeq.EventSuspended {
		switch step := (stepView{StepInfo: w.t.Steps[n-1]}); step.Kind {
		case codeq.StepSleep:
			return []sentence{say("Its handler sleeps in the step ", name(step.Name), then("goes on"))}
		case codeq.StepNoSignal:
			return []sentence{say("Its handler waits for the signal ", name(step.Name), then("goes on without it"))}
		case codeq.StepChild:
			s := say("Its handler waits in the step ", name(step.Name), " for the result of ", step.Child())
			if child, err := w.d.q.Get(w.ctx, step.Child()); err == nil {
				s = say(s, w.which(child))
			}
			return []sentence{say(s, ".")}
		default: // it waits no more
		}
	}
	switch {
	case a.Outcome == codeq.EventSuspended:
		return []sentence{say("Its handler waits between two steps", then("goes on"))}
	case a.Outcome == codeq.EventUnhandled:
		return []sentence{say("The worker that took it has no handler of its kind ", name(w.t.Kind), then("is offered again"))}
	case a.Outcome == codeq.EventReleased:
		return []sentence{say("It was given back", then("is ready again"))}
	case a.Outcome == codeq.EventExpired && w.t.Attempts > 0:
		return []sentence{say("The lease of "+w.tried()+" has expired", then("is tried again"))}
	case w.t.Attempts > 0:
		return []sentence{say(capital(w.tried())+" has failed", failure(w.t.LastError), then("is tried again"))}
	}
	return []sentence{say("It is scheduled", then("becomes ready"))}
}

// capital begins a text as a sentence.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// shownParents bounds the parents that a sentence names.
const shownParents = 5

func (w *waits) blocked() []sentence {
	if w.t.Suspect {
		return []sentence{say("It is a suspect: its process died with it at work, and it may be the reason. Suspects start slowly, one after the other, to find out which it is.")}
	}
	if s := w.parents(); s != nil {
		return s
	}
	if w.stored.Group != "" {
		if s := w.group(); s != nil {
			return s
		}
	}
	if w.stored.LimitKey != "" {
		return w.limit()
	}
	return []sentence{say("It waits for its turn.")}
}

// parents names the parents that a task waits for; nil: it waits for none.
func (w *waits) parents() []sentence {
	var pending, dead []relative
	for _, p := range w.family.Parents {
		switch {
		case p.Gone || p.State == codeq.Done.String() || p.State == codeq.Canceled.String():
		case p.State != codeq.Dead.String():
			pending = append(pending, p)
		case w.stored.OnDead == codeq.HoldOnDead:
			dead = append(dead, p)
		}
	}
	if len(pending)+len(dead) == 0 {
		if w.family.MoreParents > 0 {
			return []sentence{say("It waits for some of its "+number(len(w.stored.After)), " parents: the first ", number(parentsRead), " have ended. The flow has all of them.")}
		}
		return nil
	}
	s := say("It waits for ")
	if w.family.MoreParents > 0 {
		s = say(s, "at least ")
	}
	s = say(s, fmt.Sprintf("%s of its %s: ", number(len(pending)+len(dead)), count(len(w.stored.After), "parent", "parents")))
	all := append(slices.Clone(dead), pending...)
	for i, p := range all[:min(len(all), shownParents)] {
		if i > 0 {
			s = say(s, ", ")
		}
		s = say(s, p.ID, " ", word{State: p.State})
	}
	if len(all) > shownParents {
		s = say(s, fmt.Sprintf(", and %s more", number(len(all)-shownParents)))
	}
	both := []sentence{say(s, ".")}
	if len(dead) > 0 {
		both = append(both, say("It does not go on by itself: "+count(len(dead), "parent is a dead letter", "parents are dead letters")+", to be redriven, or canceled, which cancels this task."))
	}
	return both
}

// alike reads tasks of the queue, tenant and group of the task; more: there may be others.
func (w *waits) alike(states ...codeq.State) (tasks []*codeq.TaskInfo, more bool) {
	page, err := w.d.q.ListPage(w.ctx, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: states, Queue: w.stored.Queue, Tenants: []string{w.stored.Tenant}, Group: w.stored.Group},
		NoPayload:  w.d.leavesPayloads(), Limit: asked,
	})
	if err != nil {
		return nil, true
	}
	return page.Tasks, page.Next != ""
}

// group names the task with the turn of the group, and the place of this task; nil: it may have the
// turn itself.
func (w *waits) group() []sentence {
	var holder *codeq.TaskInfo
	tasks, unread := w.alike(codeq.Leased, codeq.Ready, codeq.Scheduled, codeq.Dead)
	for _, t := range tasks {
		if t.LimitKey != w.stored.LimitKey || holder != nil {
			continue
		}
		switch t.State {
		case codeq.Scheduled: // one that was never at work has no turn
			if last(t).Outcome != 0 {
				holder = t
			}
		case codeq.Dead:
			if w.settings.HoldGroups {
				holder = t
			}
		default:
			holder = t
		}
	}
	if holder == nil && w.stored.LimitKey != "" && !unread {
		return nil
	}
	before, found := 0, false
	tasks, unread = w.alike(codeq.Blocked)
	for _, t := range tasks {
		if found = t.ID == w.stored.ID; found {
			break
		}
		if t.LimitKey == w.stored.LimitKey && len(t.After) == 0 {
			before++
		}
	}
	group := say("group ", name(w.t.Group))
	if w.t.Group == "" {
		group = say("its group")
	}
	place := say("It waits for its turn in ", group)
	switch {
	case found:
		place = say("It is ", ordinal(before+2), " in ", group)
	case unread && len(tasks) == asked:
		place = say("It waits behind more than "+number(before)+" tasks in ", group)
	}
	if holder == nil {
		return []sentence{say(place, ", behind another task.")}
	}
	if before > 0 && found {
		place = say(place, ", "+count(before, "task waits", "tasks wait")+" before it")
	}
	s := say(place, ", behind ", holder.ID, w.which(holder), ".")
	if holder.State == codeq.Dead {
		return []sentence{s, say("The group does not go on by itself: redrive or cancel that dead letter.")}
	}
	return []sentence{s}
}

// ordinal is the word for a place.
func ordinal(n int) string {
	words := []string{"first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"}
	if n <= len(words) {
		return words[n-1]
	}
	return "number " + number(n)
}

// limit names the tasks with the places of the LimitKey.
func (w *waits) limit() []sentence {
	key := say("limit key ", name(w.t.LimitKey))
	if w.t.LimitKey == "" {
		key = say("its limit key")
	}
	s := say("It waits for a place of ", key)
	if n := w.settings.ConcurrencyPerKey; n > 0 {
		s = say(s, fmt.Sprintf(", which has %s", count(n, "place", "places")))
	}
	page, err := w.d.q.ListPage(w.ctx, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Leased}, Queue: w.stored.Queue}, NoPayload: w.d.leavesPayloads(), Limit: asked,
	})
	n := 0
	if err == nil {
		for _, t := range page.Tasks {
			if t.LimitKey != w.stored.LimitKey {
				continue
			}
			if n++; n > shownParents {
				s = say(s, ", and others")
				break
			}
			if n == 1 {
				s = say(s, ", taken by ")
			} else {
				s = say(s, ", ")
			}
			s = say(s, t.ID, w.which(t))
		}
	}
	return append([]sentence{say(s, ".")}, w.held()...)
}

// held names the places of ended tasks.
func (w *waits) held() []sentence {
	if w.row.Held == 0 {
		return nil
	}
	return []sentence{say(count(w.row.Held, "handler of the queue goes", "handlers of the queue go") + " on after the end of the lease, and " + count(w.row.Held, "place is", "places are") + " not free.")}
}

// which tells the state of another task.
func (w *waits) which(of *codeq.TaskInfo) sentence {
	t := *of
	w.d.redact(&t)
	switch how := last(&t); t.State {
	case codeq.Leased:
		if how.Worker != "" {
			return say(", which ", name(how.Worker), " has worked on for ", since(how.Start))
		}
		return say(", which has been at work for ", since(how.Start))
	case codeq.Scheduled:
		if how.Outcome == codeq.EventSuspended {
			return say(", which goes on ", t.At)
		}
		if t.Attempts > 0 {
			return say(", which retries ", t.At)
		}
		return say(", which is due ", t.At)
	case codeq.Ready:
		return say(", which has been ready for ", since(t.At))
	case codeq.Dead:
		return say(", which died ", t.At, failure(t.LastError))
	default:
		return say(", which is ", t.State)
	}
}
