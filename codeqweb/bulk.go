package codeqweb

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"codeq"
)

// Bulk changes outlive their requests, and end with the dashboard.
const (
	bulksRunning = 4
	bulksKept    = 100
	bulkWait     = 30 * time.Second // a request waits this long at most
	bulkAtOnce   = 1500 * time.Millisecond
)

// job is a bulk change, in the form of api/v1/bulk.
type job struct {
	ID     string
	Action codeq.BulkAction
	Filter codeq.TaskFilter
	// Priority, ToQueue and Rate are those of codeq.BulkOptions.
	Priority int     `json:",omitzero"`
	ToQueue  string  `json:",omitzero"`
	Rate     float64 `json:",omitzero"`
	DryRun   bool    `json:",omitzero"`
	Cursor   string  `json:",omitzero"` // where it began
	Started  time.Time
	Ended    time.Time         `json:",omitzero"` // zero: it runs
	Seen     int               // selected so far
	Expected int               `json:",omitzero"` // that a dry run has selected before; 0: not known
	Result   *codeq.BulkResult `json:",omitzero"`
	Error    string            `json:",omitzero"`
	Kind     string            `json:",omitzero"`
}

// runningJob is a job with its control. ended is closed after the last change of job.
type runningJob struct {
	job   job
	seen  atomic.Int64
	stop  context.CancelFunc
	ended chan struct{}
}

// bulks are the jobs of a dashboard.
type bulks struct {
	mu      sync.Mutex // guards the following, and runningJob.job; held while a job begins
	number  int
	running int
	jobs    []*runningJob // the oldest first
}

func (b *bulks) view(j *runningJob) job {
	b.mu.Lock()
	defer b.mu.Unlock()
	v := j.job
	v.Seen = int(j.seen.Load())
	if v.Result != nil {
		v.Seen = v.Result.Matched
	}
	return v
}

func (b *bulks) find(id string) (*runningJob, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range b.jobs {
		if j.job.ID == id {
			return j, nil
		}
	}
	return nil, &refusal{http.StatusNotFound, "not-found", "there is no such change in bulk; this process keeps the last 100"}
}

// newest returns all jobs, the newest first.
func (b *bulks) newest() []job {
	b.mu.Lock()
	all := slices.Clone(b.jobs)
	b.mu.Unlock()
	views := make([]job, 0, len(all))
	for _, j := range slices.Backward(all) {
		views = append(views, b.view(j))
	}
	return views
}

func (b *bulks) stop(ctx context.Context, id string) (job, error) {
	j, err := b.find(id)
	if err != nil {
		return job{}, err
	}
	j.stop()
	select {
	case <-j.ended:
		return b.view(j), nil
	case <-ctx.Done():
		return job{}, ctx.Err()
	}
}

// startBulk begins a bulk change.
func (d *Dashboard) startBulk(r *request, opts codeq.BulkOptions, expected int) (*runningJob, error) {
	if opts.Contents && !r.access.Has(Payloads) {
		return nil, errDenied
	}
	filter, cursor := opts.TaskFilter, opts.Cursor
	if err := d.selectShown(&opts); err != nil {
		return nil, err
	}
	b := &d.bulks
	ctx, cancel := context.WithCancel(d.ctx)
	later := r.Clone(context.WithoutCancel(r.Context())) // for the audit entries
	later.Body = http.NoBody
	b.mu.Lock()
	if b.running >= bulksRunning || d.ctx.Err() != nil {
		b.mu.Unlock()
		cancel()
		return nil, &refusal{http.StatusServiceUnavailable, "busy", "too many changes in bulk run already"}
	}
	b.running++
	b.number++
	j := &runningJob{stop: cancel, ended: make(chan struct{})}
	j.job = job{
		ID: strconv.Itoa(b.number), Action: opts.Action, Filter: filter, Priority: opts.Priority, ToQueue: opts.ToQueue,
		Rate: opts.Rate, DryRun: opts.DryRun, Cursor: cursor, Started: time.Now().UTC(), Expected: expected,
	}
	if b.jobs = append(b.jobs, j); len(b.jobs) > bulksKept { // at most bulksRunning of them run
		n := slices.IndexFunc(b.jobs, func(old *runningJob) bool { return !old.job.Ended.IsZero() })
		b.jobs = slices.Delete(b.jobs, n, n+1)
	}
	begun := make(chan struct{})
	d.running.Go(func() {
		defer cancel()
		defer d.endBulk(j, codeq.BulkResult{}, errors.New("ended by Options.Audit")) // runtime.Goexit
		func() {
			defer close(begun)
			d.auditBulk(later, r.name, b.view(j))
		}()
		d.runBulk(ctx, j, opts)
		d.auditBulk(later, r.name, b.view(j))
	})
	b.mu.Unlock()
	<-begun
	return j, nil
}

// selectShown makes a bulk change select by what Options.Redact leaves, as a list does, and opens
// its cursor.
func (d *Dashboard) selectShown(opts *codeq.BulkOptions) (err error) {
	if d.opts.Redact == nil {
		return nil
	}
	filter := opts.TaskFilter
	if err := checkText(&filter); err != nil {
		return err
	}
	if opts.Cursor, err = d.openCursor(opts.Cursor, bulkName(opts.Action, &filter)); err != nil {
		return err
	}
	if opts.TaskFilter = unhidden(filter); isNarrow(&filter) {
		opts.Match = func(t *codeq.TaskInfo) bool {
			found, _ := matches(d.redacted(t), &filter)
			return found
		}
	}
	return nil
}

func (d *Dashboard) runBulk(ctx context.Context, j *runningJob, opts codeq.BulkOptions) {
	opts.Progress = func(r codeq.BulkResult) { j.seen.Store(int64(r.Matched)) }
	result, err := d.q.Bulk(ctx, opts)
	d.endBulk(j, result, err)
}

// endBulk ends a job, unless it has ended.
func (d *Dashboard) endBulk(j *runningJob, result codeq.BulkResult, err error) {
	b := &d.bulks
	b.mu.Lock()
	defer b.mu.Unlock()
	if !j.job.Ended.IsZero() {
		return
	}
	result.Next = d.sealCursor(result.Next, bulkName(j.job.Action, &j.job.Filter))
	j.job.Result, j.job.Ended = &result, time.Now().UTC()
	if err != nil {
		e := refusalOf(err)
		if errors.Is(err, context.Canceled) {
			e = &refusal{kind: "canceled", text: "stopped"}
		}
		j.job.Error, j.job.Kind = e.text, e.kind
	}
	d.sampler.stale.Store(true)
	b.running--
	close(j.ended)
}

// auditBulk adds the beginning or the end of a job to the audit log.
func (d *Dashboard) auditBulk(r *http.Request, name string, j job) {
	e := Entry{Action: "bulk", Target: j.Filter.Queue, Error: j.Error, User: name}
	what := j.Action.String()
	if j.DryRun {
		what += ", dry run"
	}
	e.Detail = "number " + j.ID + ": " + what + describeFilter(j.Filter)
	if j.Result != nil {
		e.Detail += "; ended: " + number(j.Result.Changed) + " of " + number(j.Result.Matched) + " changed"
	}
	d.audit.add(r, e)
}

// describeFilter returns a filter in words.
func describeFilter(f codeq.TaskFilter) (text string) {
	for _, s := range f.States {
		text += " " + s.String()
	}
	for _, v := range []namedValue{{"queue", f.Queue}, {"kind", f.Kind}, {"group", f.Group}, {"key", f.Key}, {"error", f.ErrorKind}, {"text", f.Text}} {
		if v.Value != "" {
			text += ", " + v.Name + " " + v.Value.(string)
		}
	}
	if f.Contents {
		text += ", also in contents"
	}
	for _, tenant := range f.Tenants {
		if tenant == "" {
			text += ", no tenant"
		} else {
			text += ", tenant " + tenant
		}
	}
	if !f.From.IsZero() {
		text += ", from " + exact(f.From)
	}
	if !f.To.IsZero() {
		text += ", to " + exact(f.To)
	}
	return text
}

// await waits for the end of a job, at most for d.
func await(ctx context.Context, j *runningJob, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-j.ended:
	case <-t.C:
	case <-ctx.Done():
	}
}

// bulkForm begins a bulk change from a form.
func (d *Dashboard) bulkForm(w http.ResponseWriter, r *request) error {
	p := r.params
	filter, err := d.filterOf(r)
	if err != nil {
		return err
	}
	opts := codeq.BulkOptions{TaskFilter: filter, ToQueue: p.Get("to-queue"), DryRun: p.Get("dry") == "true", Cursor: p.Get("cursor")}
	if err := opts.Action.UnmarshalText([]byte(p.Get("action"))); err != nil {
		return err
	}
	if opts.Action == codeq.BulkSetPriority {
		if opts.Priority, err = intParam(p, "to-priority"); err != nil {
			return err
		}
	}
	if text := p.Get("rate"); text != "" {
		if opts.Rate, err = strconv.ParseFloat(text, 64); err != nil {
			return invalid("rate", "a number")
		}
	}
	expected := 0
	if p.Has("expected") {
		if expected, err = intParam(p, "expected"); err != nil {
			return err
		}
	}
	j, err := d.startBulk(r, opts, expected)
	if err != nil {
		return err
	}
	await(r.Context(), j, bulkAtOnce)
	w.Header().Set("Location", "./"+link("bulk", "id", j.job.ID))
	w.WriteHeader(http.StatusSeeOther)
	return nil
}

// bulkView is the content of the page of a job.
type bulkView struct {
	Job   *job
	Words string     // the filter
	Again url.Values // the form that repeats a dry run as a change; nil: none
}

// Progress says how far a running job is, at what rate, and how long it will take.
func (j *job) Progress() string {
	took := time.Since(j.Started).Seconds()
	if j.Seen == 0 || took <= 0 {
		return ""
	}
	speed := float64(j.Seen) / took
	text := number(j.Seen)
	if j.Expected > 0 {
		text += " of " + number(j.Expected)
	}
	text += ", " + rate(speed) + " a second"
	if left := j.Expected - j.Seen; left > 0 {
		text += ", " + span(time.Duration(float64(left)/speed*float64(time.Second)).Round(time.Second)) + " left"
	}
	return text
}

func (d *Dashboard) bulkPage(w http.ResponseWriter, r *request) error {
	j, err := d.bulks.find(r.params.Get("id"))
	if err != nil {
		return err
	}
	view := d.bulks.view(j)
	v := bulkView{Job: &view}
	f := v.Job.Filter
	v.Words = describeFilter(f)
	refresh := 0
	if v.Job.Ended.IsZero() {
		refresh = 1
	} else if v.Job.DryRun && v.Job.Error == "" && v.Job.Result.Matched > 0 {
		v.Again = filterQuery(f)
		v.Again.Set("action", v.Job.Action.String())
		v.Again.Set("to-priority", strconv.Itoa(v.Job.Priority))
		v.Again.Set("to-queue", v.Job.ToQueue)
		v.Again.Set("cursor", v.Job.Cursor)
		v.Again.Set("expected", strconv.Itoa(v.Job.Result.Matched))
		if v.Job.Rate > 0 {
			v.Again.Set("rate", strconv.FormatFloat(v.Job.Rate, 'g', -1, 64))
		}
	}
	return d.show(w, r, page{Title: "Bulk change " + v.Job.ID, Screen: "bulk", Refresh: refresh, Body: v})
}

func (d *Dashboard) bulksPage(w http.ResponseWriter, r *request) error {
	return d.show(w, r, page{Title: "Bulk changes", Screen: "bulks", Refresh: 3, Body: d.bulks.newest()})
}
