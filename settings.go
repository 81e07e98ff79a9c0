package codeq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/record"
)

// Settings are the settings of a queue. They are stored with it, and may change while it runs. The
// zero Settings are those of a queue that was never configured.
type Settings struct {
	// Paused: nothing is claimed from the queue. [Leased] tasks, and produces, go on.
	Paused bool `json:",omitzero"`
	// Concurrency is how many tasks of the queue may be leased at the same time. 0: no limit. A
	// handler that goes on after the end of its lease counts; see [Queue.Cancel].
	// Lowering it ends no lease. In a cluster it bounds all nodes together, whichever fail. When
	// another node becomes the leader of the first shard, tasks of queues with a Concurrency or
	// Rate may have to wait until each shard has a leader.
	Concurrency int `json:",omitzero"`
	// ConcurrencyPerKey is the same for the tasks of each [Task.LimitKey].
	ConcurrencyPerKey int `json:",omitzero"`
	// Rate is how many tasks a second may be claimed from the queue, on average; 0: any number. It
	// is the rate of a token bucket (golang.org/x/time/rate). After [Open], and in a cluster when
	// another node leads the first shard, it fills from the last claim on, as if it was empty then.
	Rate float64 `json:",omitzero"`
	// Burst is how many tasks may be claimed at once after a pause in the claims, while Rate is
	// set. 0: Rate, rounded up. The queue reads the clock once a millisecond, so that a Burst below
	// Rate/1000 lowers the rate; so does, in a cluster, a Burst below the number of tasks that Rate
	// allows in the time of a call to another node.
	Burst int `json:",omitzero"`
	// TenantWeights are the shares of the tenants in the claims, 1 to 65,536; their names are
	// UTF-8. Tenants that are not named have weight 1. With one shard, a weight is how many claims
	// in a row a tenant gets when it is its turn. With several shards, a tenant that
	// has ready tasks (of the highest priority that is ready) in n shards of the process has the
	// share weight/n in each of these. A claim is sent to a shard that is drawn in proportion to
	// the sum of the shares in it. In the shard, a turn is weight*m/n claims, where m is the
	// largest n of the tenants with tasks there. A change of n counts from the tenant's next claim
	// in the shard.
	TenantWeights map[string]int `json:",omitempty"`
	Policy                       // of the tasks of the queue
	// DeadRetention is how long dead letters are kept. 0 or [Forever]: until they are redriven,
	// purged or canceled. A dead letter that other tasks wait for, or that holds the turn of a
	// group, is kept in any case; one that others have waited for is kept for a week at least.
	DeadRetention time.Duration `json:",omitzero"`
	// HoldGroups makes a task that becomes a dead letter hold the turn of its [Task.Group]: the
	// group waits until the dead letter is redriven (then it goes first again), purged or canceled.
	// By default the turn passes to the next task of the group. A change applies to tasks that
	// become dead letters after it: a dead letter that holds a turn still holds it.
	HoldGroups bool `json:",omitzero"`
	// DeadLetterQueue is another queue that gets a task for each death of one of this queue, in the
	// same commit, with its payload, headers, tenant and priority, and headers that [DeathOf]
	// reads. The dead letter itself is kept as DeadRetention says. Eight deaths in a row, each in
	// the dead-letter queue of the one before, produce tasks, and the ninth none; nor does one for
	// which the shard has no lane. "": none.
	DeadLetterQueue string `json:",omitzero"`
}

// Death describes a dead task to the handlers of its [Settings].DeadLetterQueue.
type Death struct {
	ID          ID     `json:",omitzero"` // of the dead task
	Queue, Kind string `json:",omitzero"` // of the dead task; its successor has no kind
	Reason      string `json:",omitzero"` // its last error, up to 1 KiB
}

// DeathOf reads the headers of a task in a [Settings].DeadLetterQueue; ok is false for other tasks.
// Delete names with the beginning "codeq-dea" before you produce the headers again: with them, the
// headers may exceed [Limits].Headers, and the next death counts as one more in a row.
func DeathOf(headers map[string]string) (d Death, ok bool) {
	id, err := ParseID(headers[record.DeathTask])
	return Death{id, headers[record.DeathQueue], headers[record.DeathKind], headers[record.DeathReason]}, err == nil
}

// Policy is how tasks are tried. For each field the first that is set counts: that of the [Task],
// its handler ([HandlerOption]), its queue ([Settings]), the [Options]. A Timeout is read at the
// claim, the others when an attempt ends, so that a change applies to tasks that wait. A lease that
// expires does so by the policy of the queue.
type Policy struct {
	// MaxAttempts is how often a task is tried before it becomes a dead letter.
	MaxAttempts int `json:",omitzero"`
	// Backoff is the wait between two attempts, unless [RetryAfter] or [RetryOptions] has one. It
	// counts as one field: its zero fields have their defaults.
	Backoff Backoff `json:",omitzero"`
	// Timeout bounds one run of the handler, as [Task.Timeout] does.
	Timeout time.Duration `json:",omitzero"`
	// Retention is how long completed and canceled tasks are kept; that of the handler is for
	// completed ones. [Forever]: without end.
	Retention time.Duration `json:",omitzero"`
	// RetryFirst makes a task that is tried again go before those of its queue, tenant and priority
	// that were produced after it, and count as ready since then; by default it goes behind those
	// that are ready. That of the handler and that of the queue add up.
	RetryFirst bool `json:",omitzero"`
}

// set hides that of Policy: Settings are no HandlerOption.
func (Settings) set() {}

var _ = Settings.set

// Settings returns the settings of a queue that the last [Queue.Configure] has stored.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed].
func (q *Queue) Settings(queue string) (_ Settings, err error) {
	defer public(&err)
	ctx, err := q.beginOn(context.Background(), queue)
	if err != nil {
		return Settings{}, err
	}
	c, err := q.configured(ctx, queue)
	if err != nil {
		return Settings{}, err
	}
	return settingsOf(c.Settings), nil
}

// configured asks the first shard for the settings of a queue. The caller may change them.
func (q *Queue) configured(ctx context.Context, queue string) (engine.Configured, error) {
	stored := &call.Settings{Queue: queue}
	if err := q.ask(ctx, 0, rule(callSettings, stored)); err != nil {
		return engine.Configured{}, err
	}
	c, err := stored.Configured()
	return c, translated(err)
}

// beginOn is begin for a verb with the name of a queue.
func (q *Queue) beginOn(ctx context.Context, name string) (context.Context, error) {
	ctx, err := q.begin(ctx)
	switch {
	case err != nil:
	case name == "":
		err = &InvalidError{"queue", `""`, "a name"}
	default:
		err = checkName("queue", name, q.opts.Limits.Name)
	}
	return ctx, err
}

// Configure changes the settings of a queue, which need not exist yet. It calls change with the
// present settings, which change may alter; calls of Configure take turns. If another process has
// changed the settings meanwhile, change is called again with the new ones, so that no change is
// lost. When Configure returns, the settings, or newer ones, are stored and in force in all shards.
// If ctx ends or a shard fails after the first commit, the error matches [ErrUncertain]: the
// settings are stored, and the other shards adopt them as soon as they can.
//
// If change calls Configure, [Queue.Pause] or [Queue.Resume] of this Queue or any other, the inner
// call returns an error that matches [ErrInvalid]. change must not wait for a goroutine that calls
// them either: it would wait for ever.
//
// Errors: [ErrInvalid], [ErrFormat] (for a [Policy], in a cluster that is being upgraded),
// [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) Configure(ctx context.Context, queue string, change func(*Settings)) (err error) {
	defer public(&err)
	if ctx, err = q.beginOn(ctx, queue); err != nil {
		return err
	}
	if err := checkUTF8("queue", queue); err != nil {
		return err
	}
	if change == nil {
		return &InvalidError{"Configure change", "nil", "a function"}
	}
	return q.configure(ctx, queue, func(s *record.Settings) bool {
		changed := settingsOf(s)
		change(&changed)
		*s = *changed.inner()
		return true
	}, nil)
}

// SettingsChange is a change of the settings of a queue.
type SettingsChange struct {
	Queue         string   `json:",omitzero"`
	Before, After Settings `json:",omitzero"`
}

// Apply gives queues, by their names, the settings that a program declares when it begins, and
// returns the changes: nothing is stored for a queue that has these already. Fields that are
// not declared become zero, but Paused, which must not be declared, stays as it is. Other queues
// stay as they are.
//
// All is checked before the first change. Queues are then changed one after the other, as by
// [Queue.Configure]. With an error, the changes so far are returned, also one that is
// [ErrUncertain]; Apply may be called again.
//
// Errors: [ErrInvalid], [ErrFormat], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) Apply(ctx context.Context, declared map[string]Settings) (changes []SettingsChange, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	queues := slices.Sorted(maps.Keys(declared))
	for _, queue := range queues {
		if err := translated(declared[queue].inner().CheckDeclared(queue, q.opts.Limits.Name)); err != nil {
			return nil, fmt.Errorf("settings of queue %q: %w", queue, err)
		}
	}
	for _, queue := range queues {
		of := declared[queue]
		changed, c := false, SettingsChange{Queue: queue}
		err := q.configure(q.backend.begin(ctx), queue, func(s *record.Settings) bool {
			c.Before = settingsOf(s)
			changed = s.Declare(of.inner())
			c.After = settingsOf(s)
			return changed
		}, nil)
		if changed && (err == nil || errors.Is(err, ErrUncertain)) {
			changes = append(changes, c)
		}
		if err != nil {
			return changes, fmt.Errorf("settings of queue %q: %w", queue, err)
		}
	}
	return changes, nil
}

// inner returns the settings as shards have them.
func (s Settings) inner() *record.Settings {
	return &record.Settings{
		Paused: s.Paused, Concurrency: s.Concurrency, ConcurrencyPerKey: s.ConcurrencyPerKey, Rate: s.Rate, Burst: s.Burst,
		TenantWeights: s.TenantWeights, Policy: *s.Policy.inner(), DeadRetention: s.DeadRetention, HoldGroups: s.HoldGroups,
		DeadLetterQueue: s.DeadLetterQueue,
	}
}

func (p *Policy) inner() *record.Policy {
	return &record.Policy{MaxAttempts: p.MaxAttempts, Backoff: base.Backoff(p.Backoff), Timeout: p.Timeout, Retention: p.Retention, RetryFirst: p.RetryFirst}
}

func settingsOf(s *record.Settings) Settings {
	p := Policy{s.MaxAttempts, Backoff(s.Backoff), s.Timeout, s.Retention, s.RetryFirst}
	return Settings{s.Paused, s.Concurrency, s.ConcurrencyPerKey, s.Rate, s.Burst, s.TenantWeights, p, s.DeadRetention, s.HoldGroups, s.DeadLetterQueue}
}

// configure is Configure after its checks, unless change returns false; none, if it is not nil, is
// stored in place of the settings.
func (q *Queue) configure(ctx context.Context, queue string, change func(*record.Settings) bool, none []byte) error {
	if guard.InCallback() { // two that configure each other's queue would wait for each other
		return &InvalidError{"Configure", "a call within the function of another call", "one call after the other"}
	}
	select {
	case q.configuring <- struct{}{}:
		defer func() { <-q.configuring }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	case <-cluster.Late(ctx):
		return fmt.Errorf("%w: another call of Configure takes long", ErrNotLeader)
	}
	for {
		c, err := q.configured(ctx, queue)
		if err != nil {
			return err
		}
		changed := false
		guard.CallBack(func() { changed = change(c.Settings) })
		if !changed && c.Settings.IsZero() {
			return nil
		}
		if !changed { // a call before may not have come to all shards
			return q.enforce(ctx, queue, c.Value)
		}
		if err := translated(c.Settings.CheckFor(queue, q.opts.Limits.Name)); err != nil {
			return err
		}
		set := none
		if set == nil {
			if set, err = json.Marshal(c.Settings); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return base.EndOf(ctx)
		}
		value := keys.SettingsValue{Version: c.Version + 1, JSON: set}.Append(nil)
		first := &call.Configure{Queue: queue, Value: value}
		op := rule(callConfigure, first)
		if err := q.mayConfigure(op); err != nil {
			return err
		}
		if _, err := q.do(ctx, 0, op); err != nil {
			return err
		}
		if !first.Late {
			return q.enforce(ctx, queue, value)
		}
	}
}

// mayConfigure refuses settings that the first shard's leader, of an older build, may not know.
func (q *Queue) mayConfigure(op *ruling) error {
	if c, ok := op.Body.(*call.Configure); !ok || !c.HasPolicy() {
		return nil
	}
	return q.needsFormat(0, "policies", keys.FormatOfSteps)
}

// enforce makes all other shards adopt settings that the first one has stored. The first shard also
// sends them as messages: a shard that is closing reads these when it is opened.
func (q *Queue) enforce(ctx context.Context, queue string, value []byte) error {
	var errs []error
	for i := 1; i < len(q.replicas); i++ {
		op := rule(callAdopt, &call.Adopt{Queue: queue, Value: value})
		if _, err := q.do(ctx, i, op); !errors.Is(err, ErrClosed) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil { // which may say of one shard that nothing was applied
		return fmt.Errorf("%w: not all shards have the settings of queue %q: %w", ErrUncertain, queue, err)
	}
	return nil
}

// DeleteQueue removes the settings of an unused queue, so that it is in no list any more. It
// returns a [NotEmptyError], and changes nothing, if the queue has tasks of any state, idempotency
// keys that are taken, a schedule, or claims that wait. No call of [Queue.Configure] that comes
// late brings its settings back. A task that is produced while DeleteQueue runs is kept, in a queue
// without settings. DeleteQueue reads the idempotency keys of all queues that are taken for some
// time, beside the owners of shards.
//
// Errors: [ErrInvalid], [ErrNotEmpty], [ErrCorrupt], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) DeleteQueue(ctx context.Context, queue string) (err error) {
	defer public(&err)
	if ctx, err = q.beginOn(ctx, queue); err != nil {
		return err
	}
	found, tasks := &NotEmptyError{Queue: queue}, keys.Counts{}
	for i := range q.replicas {
		use := &listing.Use{Queue: queue}
		if err := q.read(ctx, i, callUse, use); err != nil {
			return err
		}
		tasks.Add(use.Counts)
		found.Keys += use.Keys
		found.Claims = max(found.Claims, use.Claims) // a claim waits in all shards
	}
	schedules, err := q.Schedules(ctx)
	if err != nil {
		return err
	}
	for i := range schedules {
		if schedules[i].Task.Queue == queue {
			found.Schedules++
		}
	}
	if found.Counts = Counts(tasks); found.Counts.Total() > 0 || found.Keys+found.Schedules+found.Claims > 0 {
		return found
	}
	return q.configure(ctx, queue, func(s *record.Settings) bool {
		*s = record.Settings{}
		return true
	}, keys.DeleteQueue)
}

// Pause stops claims from the queue until [Queue.Resume].
//
// Errors: [ErrInvalid], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader], [ErrClosed],
// and that of ctx.
func (q *Queue) Pause(ctx context.Context, queue string) (err error) {
	defer public(&err)
	return q.Configure(ctx, queue, func(s *Settings) { s.Paused = true })
}

// Resume ends a [Queue.Pause].
//
// Errors: [ErrInvalid], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader], [ErrClosed],
// and that of ctx.
func (q *Queue) Resume(ctx context.Context, queue string) (err error) {
	defer public(&err)
	return q.Configure(ctx, queue, func(s *Settings) { s.Paused = false })
}
