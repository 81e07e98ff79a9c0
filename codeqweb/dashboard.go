package codeqweb

import (
	"context"
	"crypto/cipher"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"codeq"
)

// Options are the options of [Handler]. A zero field means its documented default.
type Options struct {
	// Access returns the rights of a request; the application knows its user. It is called for each
	// request, by several goroutines at a time, and again every ten seconds while a stream goes on,
	// which ends when they change. Default: [Read], for all requests.
	Access func(*http.Request) Access
	// Hosts lists the accepted Host headers besides "localhost" and the loopback addresses: such as
	// "jobs.example.com", or "jobs.example.com:8443" for one port only. Others get 421: otherwise a
	// foreign page could bind its own name to this address and read the dashboard by a user's
	// browser. Behind a proxy, list the name that the proxy passes on. Default: the loopback names
	// only.
	Hosts []string
	// User returns the name of a request's user. One user has at most 32 requests and 64 streams at
	// a time; more get 429. It also sets Entry.User. Behind a proxy, set it, since all requests
	// come from one address there. It is called for each request, by several goroutines at a time.
	// Default: the client's address, and Entry.User is empty.
	User func(*http.Request) string
	// Audit is called after each change that succeeded, failed or was refused. For a bulk change it
	// is called at the beginning, and at the end with the counts and the first request. It may set
	// Entry.User. The dashboard then keeps the entry for its page of the last 1,000. Audit must not
	// keep the *Entry. Default: no call.
	Audit func(*http.Request, *Entry)
	// Redact is called with a copy of each task before it is shown, as page or JSON, and may change
	// it: for instance remove a secret from its Payload, Headers, Metadata, Steps, Cursors, Logs,
	// Progress, Result, LastError or History. If it changes LastError, the errors in History that
	// it leaves are hidden. It may replace these slices and maps, but must not write into them,
	// except into History.
	//
	// Tasks of lists have no Steps, Cursors and Logs. Tasks that are shown only by ID, State, Queue
	// and Kind, as in a flow, may lack Payload and Result, too. Tasks of schedules have no ID.
	// Tasks of events have ID, Queue, Tenant, Attempts, LastError and Progress only.
	//
	// The filter of a list or a bulk change selects by what Redact leaves, and so do idempotency
	// keys: more tasks are read, and Redact is called for those that are not shown, too. A bulk
	// change by Queue, States and times alone is of all such tasks. Produce still refuses a key
	// that is taken. Cursors are encrypted: one is good for the Dashboard that has made it, and not
	// after its process. Default: all is shown that Access allows.
	Redact func(*codeq.TaskInfo)
	// Format returns a payload or a result as text for a page, such as the JSON form of a message;
	// "": use the default. Default: JSON is indented, other text is unchanged, everything else is
	// hexadecimal.
	Format func(queue string, data []byte) string
}

// Dashboard is the dashboard of a queue, made by [Handler]. Its methods are safe for concurrent
// use.
type Dashboard struct {
	q     *codeq.Queue
	opts  Options
	cross *http.CrossOriginProtection
	// sealer encrypts cursors for viewers, with Options.Redact: cursor.go.
	sealer cipher.AEAD

	ctx     context.Context // ends with Close, or with the queue
	end     func()          // ends ctx, while no bulk change begins
	running sync.WaitGroup  // the goroutines of the dashboard

	sampler   *sampler
	audit     auditLog
	bulks     bulks
	kin       searchCache[foundChildren]
	flows     searchCache[*flow]
	days      *survey[[]codeq.DayTotals] // of all queues
	usage     *survey[*usage]
	runs      *survey[*lastRuns]
	health    health
	routes    map[string]map[string]*route // by path and method
	templates map[string]*template.Template
	assets    map[string]*asset // by path

	busy     chan struct{} // one element for each request that calls the queue
	large    chan struct{} // one element for each request with a large body
	searches chan struct{} // one element for each search
	streams  atomic.Int64
	users    users
}

// The bounds of all requests together.
const (
	maxBusy     = 64
	maxLarge    = 4
	busyWaits   = 5 * time.Second  // for a place
	requestTime = 20 * time.Second // for the answer of a plainRoute or largeRoute
	bodyTime    = 30 * time.Second // to read a request
	smallBody   = 1 << 20
	largeBody   = 32 << 20
)

// Handler returns the dashboard of a queue. A nil *Options means all defaults. The dashboard ends
// when the queue is closed, or by [Dashboard.Close]: its goroutines, streams and bulk changes end
// soon afterwards, and requests get 503. Close the queue after the server that serves the
// dashboard.
//
// The queue may come from [codeq.OpenLocal]: then the dashboard shows another process, over its
// local socket.
func Handler(q *codeq.Queue, opts *Options) *Dashboard {
	d := &Dashboard{
		q: q, cross: http.NewCrossOriginProtection(), sealer: newSealer(),
		busy: make(chan struct{}, maxBusy), large: make(chan struct{}, maxLarge), searches: make(chan struct{}, maxSearches), kin: newSearchCache[foundChildren](), flows: newSearchCache[*flow](),
	}
	if opts != nil {
		d.opts = *opts
	}
	if d.opts.Access == nil {
		d.opts.Access = func(*http.Request) Access { return Read }
	}
	d.usage, d.runs, d.days = newSurvey(d.readUsage), newSurvey(d.readRuns), newSurvey(d.readDays)
	ctx, cancel := context.WithCancel(context.Background())
	d.ctx, d.end = ctx, func() {
		d.bulks.mu.Lock()
		defer d.bulks.mu.Unlock()
		cancel()
	}
	d.audit.hook = d.opts.Audit
	d.loadPages()
	d.routes = d.allRoutes()
	d.sampler = newSampler(q, d.ctx, d.end)
	d.sampler.viewers.render = d.renderTopic
	d.running.Go(d.sampler.run)
	d.running.Go(d.sampler.watch)
	return d
}

// Close ends the dashboard with its streams and running bulk changes, and waits for its goroutines.
// It leaves the queue open. It may be called more than once, and always returns nil.
func (d *Dashboard) Close() error {
	d.end()
	d.running.Wait()
	return nil
}

// until returns a context that ends with ctx, with the dashboard, and after length.
func (d *Dashboard) until(ctx context.Context, length time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, length)
	stop := context.AfterFunc(d.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// route serves one method of one path.
type route struct {
	needs Access
	kind  routeKind
	serve func(http.ResponseWriter, *request) error
	takes []string // the parameters in the URL of a JSON form; those that end with "+" may be repeated
}

type routeKind uint8

const (
	plainRoute  routeKind = iota
	streamRoute           // long, with its own bound
	waitRoute             // may wait for long, without a place in Dashboard.busy
	largeRoute            // has a large body
)

// request is a request with its path, user and access.
type request struct {
	*http.Request
	path   string // of the route, without the first slash
	user   string // counts against this user's bounds
	name   string // of the user, by Options.User; "": unknown
	access Access
	api    bool
	params url.Values // of the URL and the form
}

// ServeHTTP answers a request to the dashboard.
func (d *Dashboard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	setSecurityHeaders(w.Header())
	where := strings.TrimPrefix(r.URL.Path, "/")
	q := &request{Request: r, path: where, api: where == "api/v1" || strings.HasPrefix(where, "api/")}
	a := &answer{w: w, r: r}
	leave, err := d.enterUser(q)
	if err == nil {
		defer leave() // after the answer is sent
		err = d.answer(a, q)
	}
	if err != nil {
		d.refuse(a, q, err)
	}
	a.send()
}

// enterUser counts a request of its user until leave is called. Health probes do not count: they
// call the queue once a second at most.
func (d *Dashboard) enterUser(r *request) (leave func(), err error) {
	if r.isProbe() {
		return func() {}, nil
	}
	if r.user, r.name, err = d.userOf(r.Request); err != nil {
		return nil, err
	}
	if rt := d.routes[r.path][http.MethodGet]; rt != nil && rt.kind == streamRoute && r.Method != http.MethodHead {
		return d.users.enter(&d.users.streams, r.user, streamsOfUser)
	}
	return d.users.enter(&d.users.requests, r.user, requestsOfUser)
}

func (r *request) isProbe() bool { return r.path == "healthz" || r.path == "readyz" }

func (d *Dashboard) answer(w http.ResponseWriter, r *request) error {
	if r.isProbe() {
		return d.serveHealth(w, r)
	}
	if !d.knows(r.Host) {
		return &refusal{http.StatusMisdirectedRequest, "host", "this host name is not one of Options.Hosts of the dashboard"}
	}
	if err := d.cross.Check(r.Request); err != nil {
		return &refusal{http.StatusForbidden, "denied", "a request from another origin"}
	}
	if a, ok := d.assets[r.path]; ok {
		return serveAsset(w, r, a)
	}
	if uri, _, _ := strings.Cut(r.RequestURI, "?"); r.path == "" && uri != "" && !strings.HasSuffix(uri, "/") {
		// mounted at a path without a final slash: relative links would be wrong there
		w.Header().Set("Location", "./"+path.Base(uri)+"/")
		w.WriteHeader(http.StatusFound)
		return nil
	}
	var err error
	if r.access, err = d.accessOf(r.Request); err != nil {
		return err
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	at := d.routes[r.path]
	rt := at[method]
	switch {
	case at == nil:
		kind := "no-page"
		if r.api {
			kind = "not-found"
		}
		return &refusal{http.StatusNotFound, kind, "there is no such page"}
	case rt == nil:
		allowed := strings.Join(slices.Sorted(maps.Keys(at)), ", ")
		w.Header().Set("Allow", allowed)
		return &refusal{http.StatusMethodNotAllowed, "method", "this page takes " + allowed}
	}
	var malformed error
	r.params, malformed = url.ParseQuery(r.URL.RawQuery)
	if needs := rt.needs | Read; !r.access.Has(needs) { // before a body is read
		if method == http.MethodPost {
			d.audited(r, r.params, errDenied, true)
		}
		return errDenied
	}
	if err := rt.checkParams(r, malformed); err != nil {
		if method == http.MethodPost {
			d.audited(r, r.params, err, false)
		}
		return err
	}
	if d.ctx.Err() != nil {
		return codeq.ErrClosed
	}
	if method == http.MethodPost && !r.api {
		if err := d.readForm(w, r); err != nil {
			return err
		}
	}
	return d.serve(w, r, rt)
}

var errDenied = &refusal{http.StatusForbidden, "denied", "you may not do this here"}

// serve answers an allowed request, within the bounds of all requests.
func (d *Dashboard) serve(w http.ResponseWriter, r *request, rt *route) error {
	if rt.kind == streamRoute {
		return rt.serve(w, r)
	}
	length := requestTime
	if rt.kind == waitRoute {
		length += bulkWait
	}
	ctx, cancel := d.until(r.Context(), length)
	defer cancel()
	r.Request = r.WithContext(ctx)
	if rt.kind != waitRoute {
		place := d.busy
		if rt.kind == largeRoute {
			place = d.large
		}
		if err := enter(ctx, place); err != nil {
			return err
		}
		defer func() { <-place }()
	}
	return rt.serve(w, r)
}

// enter waits for a place.
func enter(ctx context.Context, place chan struct{}) error {
	t := time.NewTimer(busyWaits)
	defer t.Stop()
	select {
	case place <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return &refusal{http.StatusServiceUnavailable, "busy", "too many requests at a time"}
	}
}

func (d *Dashboard) knows(host string) bool { return hosts(d.opts.Hosts).allow(host) }

// readForm reads the form of a page.
func (d *Dashboard) readForm(w http.ResponseWriter, r *request) error {
	defer limitBody(w)()
	r.Body = http.MaxBytesReader(underlying(w), r.Body, smallBody)
	if err := r.ParseForm(); err != nil {
		return unreadable(err)
	}
	// Names are in the URL: in fields of a form, a browser changes line ends, and bytes that are
	// not UTF-8.
	for name, values := range r.PostForm {
		if !r.params.Has(name) {
			r.params[name] = values
		}
	}
	return nil
}

// limitBody bounds the time to read a body. end removes the deadline: a later one would end the
// request before its answer.
func limitBody(w http.ResponseWriter) (end func()) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTime))
	return func() { _ = c.SetReadDeadline(time.Time{}) }
}

// unreadable converts an error of reading a body.
func unreadable(err error) error {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return &refusal{http.StatusRequestEntityTooLarge, "invalid", "the request is too large"}
	}
	return &refusal{http.StatusBadRequest, "invalid", "the request cannot be read: " + err.Error()}
}

// refusal is the error of a request: the HTTP status, the Kind of the JSON form, and a text.
type refusal struct {
	status int
	kind   string
	text   string
}

func (e *refusal) Error() string { return e.text }

// kinds lists the errors of the library; refusalOf takes the first that matches.
var kinds = []struct {
	err    error
	status int
	kind   string
}{
	{codeq.ErrUncertain, http.StatusServiceUnavailable, "uncertain"},
	{codeq.ErrInvalid, http.StatusBadRequest, "invalid"},
	{codeq.ErrNotFound, http.StatusNotFound, "not-found"},
	{codeq.ErrDuplicate, http.StatusConflict, "duplicate"},
	{codeq.ErrNotWaiting, http.StatusConflict, "not-waiting"},
	{codeq.ErrNotEmpty, http.StatusConflict, "not-empty"},
	{codeq.ErrCannotLead, http.StatusConflict, "cannot-lead"},
	{codeq.ErrNoCluster, http.StatusConflict, "no-cluster"},
	{codeq.ErrDiskFull, http.StatusInsufficientStorage, "disk-full"},
	{codeq.ErrNotLeader, http.StatusServiceUnavailable, "not-leader"},
	{codeq.ErrNotServed, http.StatusServiceUnavailable, "not-served"},
	{codeq.ErrClosed, http.StatusServiceUnavailable, "closed"},
	{codeq.ErrCorrupt, http.StatusInternalServerError, "corrupt"},
	{codeq.ErrFailed, http.StatusServiceUnavailable, "failed"},
	{codeq.ErrStalled, http.StatusServiceUnavailable, "stalled"},
	{codeq.ErrFormat, http.StatusNotImplemented, "format"},
	{errors.ErrUnsupported, http.StatusNotImplemented, "format"},
	{context.DeadlineExceeded, http.StatusGatewayTimeout, "canceled"},
	{context.Canceled, http.StatusGatewayTimeout, "canceled"},
}

// refusalOf converts an error.
func refusalOf(err error) *refusal {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r
	}
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return &refusal{k.status, k.kind, err.Error()}
		}
	}
	return &refusal{http.StatusInternalServerError, "internal", err.Error()}
}

// errorBody is the JSON form of an error.
type errorBody struct {
	Error string
	Kind  string
	ID    codeq.ID   `json:",omitzero"` // of the task that has the key of a duplicate
	Key   string     `json:",omitzero"`
	IDs   []codeq.ID `json:",omitempty"` // of a batch that is stored in part
}

func (e *refusal) body() errorBody { return errorBody{Error: e.text, Kind: e.kind} }

// refuse answers with an error.
func (d *Dashboard) refuse(w http.ResponseWriter, r *request, err error) {
	e := refusalOf(err)
	if e.kind == "busy" {
		w.Header().Set("Retry-After", "2")
	}
	if d.ctx.Err() != nil && e.kind == "canceled" {
		e = &refusal{http.StatusServiceUnavailable, "closed", "the dashboard is closed"}
	}
	switch {
	case r.api:
		body := e.body()
		if dup, ok := errors.AsType[*codeq.DuplicateError](err); ok {
			body.ID, body.Key = dup.ID, dup.Key
		}
		if part, ok := errors.AsType[*partlyStored](err); ok {
			body.IDs = part.ids
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(e.status)
		_ = json.NewEncoder(w).Encode(body)
	case !r.access.Has(Read): // no page without the right to read
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(e.status)
		_, _ = fmt.Fprintln(w, e.text)
	default:
		p := page{Title: "Error", Screen: "error", Status: e.status, Body: struct{ Text, Kind string }{e.text, e.kind}}
		if err := d.show(w, r, p); err != nil {
			http.Error(w, e.text, e.status)
		}
	}
}

// screens lists the pages. Each has a template of the same name.
var screens = []string{
	"overview", "queue", "tasks", "task", "flow", "dead", "schedules", "workers", "storage", "cluster", "audit", "bulk", "bulks", "search", "error",
}

// link returns the relative URL of a page. pairs has the names and values of its query; empty
// values are left out.
func link(screen string, pairs ...any) string {
	p := make(url.Values)
	for i := 0; i+1 < len(pairs); i += 2 {
		if v := fmt.Sprint(pairs[i+1]); v != "" {
			p.Add(fmt.Sprint(pairs[i]), v)
		}
	}
	if len(p) == 0 {
		return screen
	}
	return screen + "?" + p.Encode()
}

// page is a screen with the data of the layout around it.
type page struct {
	Title  string
	Screen string
	Loads  []string // names of styles and scripts, besides those of all pages
	Status int      // of the answer; 0: 200
	Live   string   // the query of the stream that the page follows
	// Refresh is the number of seconds until the page is loaded again, for what Live does not send;
	// 0: never.
	Refresh int
	Body    any

	// set by show
	Access Access
	Done   string // the message about the last change
	Back   string // this page, for forms to come back to
	Root   string // prefix of relative links to pages: "", or "../" for the error of an action
}

// Styles and Scripts are the parts of Loads.
func (p page) Styles() []string  { return p.loads(".css") }
func (p page) Scripts() []string { return p.loads(".js") }

func (p page) loads(ext string) (names []string) {
	for _, name := range p.Loads {
		if path.Ext(name) == ext {
			names = append(names, name)
		}
	}
	return names
}

// CanAct reports whether the viewer may change tasks.
func (p page) CanAct() bool { return p.Access.Has(Act) }

// CanAdmin reports whether the viewer may change queues, schedules, workers and leaders.
func (p page) CanAdmin() bool { return p.Access.Has(Admin) }

// show answers with a page.
func (d *Dashboard) show(w http.ResponseWriter, r *request, p page) error {
	p.Access = r.access
	p.Back, p.Root = r.path, up(r.path)
	if r.Method == http.MethodGet && r.URL.RawQuery != "" {
		q := r.URL.Query()
		q.Del("did")
		p.Back += "?" + q.Encode()
	}
	if a := actions[r.URL.Query().Get("did")]; a != nil && r.Method == http.MethodGet {
		p.Done = a.done
	}
	var b strings.Builder
	if err := d.templates[p.Screen].ExecuteTemplate(&b, "layout", p); err != nil {
		return fmt.Errorf("template %s: %w", p.Screen, err)
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if p.Status != 0 {
		w.WriteHeader(p.Status)
	}
	_, _ = w.Write([]byte(b.String()))
	return nil
}

// back redirects to a page of the dashboard after a change. The page shows the message did.
func (d *Dashboard) back(w http.ResponseWriter, r *request, did, otherwise string) {
	to, err := url.Parse(r.params.Get("back"))
	if err != nil || !r.params.Has("back") || to.Scheme != "" || to.Host != "" || to.Opaque != "" || to.User != nil || d.routes[to.Path][http.MethodGet] == nil {
		to = &url.URL{Path: otherwise}
	}
	q := to.Query()
	q.Set("did", did)
	to = &url.URL{Path: to.Path, RawQuery: q.Encode()}
	w.Header().Set("Location", "./"+up(r.path)+to.String())
	w.WriteHeader(http.StatusSeeOther)
}

// up returns the relative prefix from a path, such as "task/cancel", to the pages.
func up(path string) string { return strings.Repeat("../", strings.Count(path, "/")) }

// health caches the state of the queue for a second, so that probes are cheap.
type health struct {
	mu    sync.Mutex
	at    time.Time
	alive error // the queue is closed, or a shard has failed
	ready error // or has no leader
}

func (d *Dashboard) serveHealth(w http.ResponseWriter, r *request) error {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", http.MethodGet)
		return &refusal{http.StatusMethodNotAllowed, "method", "this takes GET"}
	}
	alive, ready := d.askHealth()
	err := alive
	if r.path == "readyz" {
		err = ready
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintln(w, refusalOf(err).kind) // the text may have internal details
		return nil
	}
	_, _ = fmt.Fprintln(w, "ok")
	return nil
}

// askHealth calls every shard, at most once a second.
func (d *Dashboard) askHealth() (alive, ready error) {
	h := &d.health
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.at) < time.Second && d.ctx.Err() == nil {
		return h.alive, h.ready
	}
	ctx, cancel := context.WithTimeout(d.ctx, 2*time.Second)
	defer cancel()
	h.ready = d.q.Health(ctx)
	if h.ready == nil {
		h.ready = d.q.WaitReady(ctx)
	}
	if h.ready == nil {
		_, h.ready = d.q.Stats(ctx)
	}
	if d.ctx.Err() != nil {
		h.ready = codeq.ErrClosed
	}
	h.alive = nil
	if errors.Is(h.ready, codeq.ErrClosed) || errors.Is(h.ready, codeq.ErrFailed) || errors.Is(h.ready, codeq.ErrCorrupt) {
		h.alive = h.ready
	}
	h.at = time.Now()
	return h.alive, h.ready
}
