package offline

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"

	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/record"
)

// An export has a line for each thing that is stored and cannot be derived. The shard of a task and
// the number of its lane are parts of its ID, so that Import gives it another ID, and changes it
// wherever it is named; the time and the random part of an ID stay. Places, indexes, counters and
// buckets follow from the lines, and are derived by the code of a repair. Only the entries of a
// cluster are left behind: sessions, interests, the clock of leases, placements.

// lineVersion is that of the lines.
const lineVersion = 3

// Line is a line of an export: a JSON object with one of its fields. Times are milliseconds since
// 1970, durations are milliseconds. The order is that of the fields; only tasks and keys are mixed,
// and so are ties: dependents, pins, tellings, wakeups and messages.
type Line struct {
	Header    *headerLine    `json:",omitempty"`
	Options   *optionsLine   `json:",omitempty"`
	Settings  *settingsLine  `json:",omitempty"`
	Schedule  *scheduleLine  `json:",omitempty"`
	Totals    *totalsLine    `json:",omitempty"`
	Task      *taskLine      `json:",omitempty"`
	Key       *keyLine       `json:",omitempty"`
	Dependent *dependentLine `json:",omitempty"`
	Pin       *pinLine       `json:",omitempty"`
	Telling   *tellingLine   `json:",omitempty"`
	Wake      *wakeLine      `json:",omitempty"`
	Message   *messageLine   `json:",omitempty"`
	End       *End           `json:",omitempty"`
}

// part returns which part of an export the line belongs to.
func (l *Line) part() int {
	switch {
	case l.Header != nil || l.Options != nil:
		return 0
	case l.Settings != nil:
		return 1
	case l.Schedule != nil:
		return 2
	case l.Totals != nil:
		return 3
	case l.Task != nil || l.Key != nil:
		return 4
	}
	return 5
}

// about says in an error which line it is, of those with names.
func (l *Line) about() string {
	switch {
	case l.Settings != nil:
		return fmt.Sprintf("settings of queue %q", l.Settings.Queue)
	case l.Schedule != nil:
		return fmt.Sprintf("schedule %q", l.Schedule.Name)
	case l.Totals != nil:
		return fmt.Sprintf("totals of queue %q", l.Totals.Queue)
	case l.Task != nil:
		return "task " + l.Task.ID.String()
	case l.Wake != nil:
		return fmt.Sprintf("a wakeup in queue %q", l.Wake.Queue)
	}
	return "a message between shards"
}

// headerLine is the first line.
type headerLine struct {
	Codeq   string // magic
	Version int
	Shards  int
	Time    uint64
	Clock   uint64 // the largest of the clocks that the shards make IDs by
	Periods uint64 // the clock of keys, waits between attempts, and retention
	Tasks   uint64 // about how many lines of tasks follow
	Crashed bool   `json:",omitzero"` // a process has died, and no other has closed the queue since
}

const magic = "export"

// optionsLine are those of the application that a tool goes by.
type optionsLine manifest.Options

// settingsLine are the settings of a queue.
type settingsLine struct {
	Queue   string
	Version uint64
	Value   json.RawMessage // as stored
	// Granted is when the last task of a queue with a rate was leased, by the clock of periods; 0:
	// none was since it has the rate; nil: there is no rate, or that is not known.
	Granted *uint64 `json:",omitempty"`
}

// scheduleLine is a schedule, and how far it has come.
type scheduleLine struct {
	Name     string
	Start    uint64
	Passed   uint64 // ticks up to here are over
	Last     uint64 `json:",omitzero"`
	Missed   uint8  `json:",omitzero"`
	Paused   bool   `json:",omitzero"`
	Every    uint64 `json:",omitzero"`
	Jitter   uint64 `json:",omitzero"`
	Cron     string `json:",omitzero"`
	TimeZone string `json:",omitzero"`
	Template        // of the tasks of its ticks
}

// totalsLine are the totals of a queue up to a day, over all shards.
type totalsLine struct {
	Queue string
	Day   uint32 // since 1970
	All   []uint64
	OfDay []uint64
}

// keyLine is an idempotency key that is taken for a time by a task that is not kept any more. Only
// its hash is stored.
type keyLine struct {
	Hash  []byte
	Until uint64
}

// dependentLine is a task that waits for the end of another one, which knows it.
type dependentLine struct {
	Parent, Child lineID
	OnDead        uint8 `json:",omitzero"`
}

// pinLine says that the result of a parent is kept for a child.
type pinLine struct{ Child, Parent lineID }

// tellingLine is a task that has ended, and is telling its children how.
type tellingLine struct {
	ID  lineID
	End lineState
}

// wakeLine is a task that may go on, or the next one of a scope.
type wakeLine struct {
	Queue  string
	Scope  uint64 `json:",omitzero"`
	ID     lineID `json:",omitzero"`
	Cancel bool   `json:",omitzero"`
}

// messageLine is a message between two shards that was not taken yet.
type messageLine struct {
	Kind     uint8
	Task     *Template  `json:",omitempty"` // to be produced
	Tasks    []Template `json:",omitempty"` // likewise, together
	Siblings []lineID   `json:",omitempty"` // of these
	Parent   lineID     `json:",omitzero"`
	Child    lineID     `json:",omitzero"`
	Outcome  uint8      `json:",omitzero"`
	Until    uint64     `json:",omitzero"`
	Schedule string     `json:",omitzero"`
	Tick     uint64     `json:",omitzero"`
}

// Counts are numbers of lines, by kind.
type Counts struct {
	Settings, Schedules, Totals, Keys, Tasks int
	Ties                                     int // all others
}

func (c *Counts) count(l *Line) {
	switch {
	case l.Settings != nil:
		c.Settings++
	case l.Schedule != nil:
		c.Schedules++
	case l.Totals != nil:
		c.Totals++
	case l.Key != nil:
		c.Keys++
	case l.Task != nil:
		c.Tasks++
	case l.part() > 0:
		c.Ties++
	}
}

// End is the last line.
type End struct {
	Counts
	SHA256 string // of all lines before, in hexadecimal
}

// lineID is the ID of a task.
type lineID keys.ID

// MarshalText returns the canonical form of a UUID.
func (id lineID) MarshalText() ([]byte, error) {
	return keys.AppendIDText(make([]byte, 0, keys.IDTextLen), keys.ID(id)), nil
}

// UnmarshalText reads it.
func (id *lineID) UnmarshalText(b []byte) error {
	parsed, ok := keys.ParseID(b)
	if !ok {
		return fmt.Errorf("%q is no ID", b)
	}
	*id = lineID(parsed)
	return nil
}

func (id lineID) String() string { return keys.FormatID(keys.ID(id)) }

// lineState is where a task lies: a range of keys.
type lineState byte

// states are the texts of the states. A leased task is one that is ready and has a lease.
var states = map[lineState]string{
	keys.Task: "ready", keys.Scheduled: "scheduled", keys.Blocked: "blocked",
	keys.Dead: "dead", keys.Done: "done", keys.Canceled: "canceled",
}

// MarshalText returns the name of the state.
func (s lineState) MarshalText() ([]byte, error) {
	text, ok := states[s]
	if !ok {
		return nil, fmt.Errorf("no state %#x", byte(s))
	}
	return []byte(text), nil
}

// UnmarshalText reads it.
func (s *lineState) UnmarshalText(b []byte) error {
	for state, text := range states {
		if text == string(b) {
			*s = state
			return nil
		}
	}
	return fmt.Errorf("no state is %q", b)
}

// maxLine bounds a line: a task may have payload, result and headers of 64 MiB each, in base64.
const maxLine = 1 << 30

// ErrFile is matched by the errors of an export that cannot be read.
var ErrFile = errors.New("export is not as it was written")

// writer writes lines.
type writer struct {
	out  *bufio.Writer
	sum  hash.Hash
	buf  bytes.Buffer
	json *json.Encoder
	end  End
}

func newWriter(out io.Writer) *writer {
	w := &writer{out: bufio.NewWriterSize(out, 1<<20), sum: sha256.New()}
	w.json = json.NewEncoder(&w.buf)
	w.json.SetEscapeHTML(false)
	return w
}

// The encoder writes replaced for bytes that are not UTF-8, and backslash for a backslash.
var replaced, backslash = []byte(`\ufffd`), []byte(`\\`)

func (w *writer) write(l *Line) error {
	w.buf.Reset()
	if err := w.json.Encode(l); err != nil {
		return err
	}
	if b := w.buf.Bytes(); bytes.Contains(b, replaced) && bytes.Contains(bytes.ReplaceAll(b, backslash, nil), replaced) {
		return fmt.Errorf("%s: a name, key or header is not UTF-8, as new ones are", l.about())
	}
	w.end.count(l)
	_, _ = w.sum.Write(w.buf.Bytes()) // never fails
	_, err := w.out.Write(w.buf.Bytes())
	return err
}

// finish writes the last line.
func (w *writer) finish() error {
	w.end.SHA256 = hex.EncodeToString(w.sum.Sum(nil))
	w.buf.Reset()
	if err := w.json.Encode(&Line{End: &w.end}); err != nil {
		return err
	}
	if _, err := w.out.Write(w.buf.Bytes()); err != nil {
		return err
	}
	return w.out.Flush()
}

// reader reads lines.
type reader struct {
	in   *bufio.Reader
	sum  hash.Hash
	buf  []byte
	line int
	seen Counts
}

func newReader(in io.Reader) *reader {
	return &reader{in: bufio.NewReaderSize(in, 1<<20), sum: sha256.New()}
}

// wrong returns an error of the last line.
func (r *reader) wrong(err error) error {
	return fmt.Errorf("line %d of the export: %w: %w", r.line, ErrFile, err)
}

// next reads a line into l, and returns its text, which is valid until the next call. done: all
// lines have been read, and none is missing or changed.
func (r *reader) next(l *Line) (text []byte, done bool, err error) {
	text, err = r.read()
	if err != nil {
		return nil, false, err
	}
	if err := parse(text, l); err != nil {
		return nil, false, r.wrong(err)
	}
	if l.End == nil {
		_, _ = r.sum.Write(text) // never fails
		r.seen.count(l)
		return text, false, nil
	}
	switch sum := hex.EncodeToString(r.sum.Sum(nil)); {
	case l.End.Counts != r.seen:
		return nil, false, r.wrong(fmt.Errorf("it has counted %+v, and there are %+v", l.End.Counts, r.seen))
	case l.End.SHA256 != sum:
		return nil, false, r.wrong(fmt.Errorf("the SHA-256 of the lines is %s, and was %s: a line was changed, or replaced", sum, l.End.SHA256))
	}
	if _, err := r.in.ReadByte(); err != io.EOF {
		return nil, false, r.wrong(errors.New("something follows its end"))
	}
	return nil, true, nil
}

// read reads the text of a line.
func (r *reader) read() ([]byte, error) {
	r.buf = r.buf[:0]
	for {
		part, err := r.in.ReadSlice('\n')
		r.buf = append(r.buf, part...)
		switch {
		case err == nil:
			r.line++
			return r.buf, nil
		case errors.Is(err, bufio.ErrBufferFull) && len(r.buf) < maxLine:
		case errors.Is(err, bufio.ErrBufferFull):
			r.line++
			return nil, r.wrong(fmt.Errorf("it is longer than %d bytes", maxLine))
		case errors.Is(err, io.EOF):
			r.line++
			return nil, r.wrong(fmt.Errorf("it is cut short: %w", io.ErrUnexpectedEOF))
		default:
			return nil, fmt.Errorf("read the export: %w", err)
		}
	}
}

// parse reads a line, which has exactly one of the fields.
func parse(text []byte, l *Line) error {
	*l = Line{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(l); err != nil {
		return err
	}
	if rest, err := io.ReadAll(d.Buffered()); err != nil || len(bytes.TrimSpace(rest)) > 0 {
		return errors.New("it has more than one object")
	}
	n := 0
	for _, set := range [...]bool{
		l.Header != nil, l.Options != nil, l.Settings != nil, l.Schedule != nil, l.Totals != nil, l.Key != nil, l.Task != nil,
		l.Dependent != nil, l.Pin != nil, l.Telling != nil, l.Wake != nil, l.Message != nil, l.End != nil,
	} {
		if set {
			n++
		}
	}
	if n != 1 {
		return fmt.Errorf("it has %d fields in place of one", n)
	}
	return nil
}

// header reads the first line.
func (r *reader) header() (*headerLine, error) {
	text, err := r.read()
	if err != nil {
		return nil, err
	}
	// A version may have other fields, so it is looked at first.
	var first struct {
		Header *struct {
			Codeq   string
			Version int
		}
	}
	if err := json.Unmarshal(text, &first); err != nil || first.Header == nil || first.Header.Codeq != magic {
		return nil, r.wrong(errors.New("it is not what export writes"))
	}
	if v := first.Header.Version; v < lineVersion {
		return nil, r.wrong(fmt.Errorf(
			"it is of version %d, and this command reads version %d: import it with the codeq that wrote it; this one opens the directory that it makes, and can export that again",
			v, lineVersion))
	} else if v > lineVersion {
		return nil, r.wrong(fmt.Errorf("it is of version %d, and this command reads version %d: import it with the codeq that wrote it, or a newer one", v, lineVersion))
	}
	var l Line
	if err := parse(text, &l); err != nil {
		return nil, r.wrong(err)
	}
	if l.Header.Shards < 1 {
		return nil, r.wrong(fmt.Errorf("%d shards", l.Header.Shards))
	}
	_, _ = r.sum.Write(text) // never fails
	return l.Header, nil
}

// Template is a task as it is produced: by a tick, or by a message.
type Template struct {
	Queue    string
	Tenant   string `json:",omitzero"`
	Priority uint8  `json:",omitzero"`
	Record
}

// Record is a record.Record, without the hashes that follow from its fields and the queue.
type Record struct {
	Attempts    uint32            `json:",omitzero"`
	Leases      uint32            `json:",omitzero"`
	MaxAttempts uint32            `json:",omitzero"`
	LeaseFor    uint64            `json:",omitzero"`
	Timeout     uint64            `json:",omitzero"`
	Retention   int64             `json:",omitzero"` // -1: for ever
	RunAt       uint64            `json:",omitzero"`
	Unique      *uniqueLine       `json:",omitempty"`
	Group       string            `json:",omitzero"`
	LimitKey    string            `json:",omitzero"`
	Kind        string            `json:",omitzero"`
	IsParent    bool              `json:",omitzero"`
	Expired     bool              `json:",omitzero"`
	Rewritten   bool              `json:",omitzero"`
	RetryFirst  bool              `json:",omitzero"`
	HoldsTurn   bool              `json:",omitzero"`
	Crashes     uint32            `json:",omitzero"`
	Suspect     bool              `json:",omitzero"`
	LastError   string            `json:",omitzero"`
	Headers     map[string]string `json:",omitempty"`
	After       []lineID          `json:",omitempty"`
	OnDead      uint8             `json:",omitzero"`
	OnMissing   uint8             `json:",omitzero"`
	History     *record.History   `json:",omitempty"`
	Notes       *record.Notes     `json:",omitempty"`
	Payload     []byte            `json:",omitempty"`
}

// uniqueLine is an idempotency key.
type uniqueLine struct {
	Key     string
	Hash    []byte
	For     uint64 `json:",omitzero"`
	MaxWait uint64 `json:",omitzero"`
	Flags   uint8  `json:",omitzero"`
}

// taskLine is a task that is stored.
type taskLine struct {
	ID    lineID
	State lineState
	Template
	// Since orders the ready tasks of a lane; 0: the task lies where it was produced.
	Since uint64 `json:",omitzero"`
	Due   uint64 `json:",omitzero"` // of a scheduled task
	// Of a blocked task: it waits for its group, its limit, or the other suspects of a crash, or
	// else for its parents.
	ForGroup    bool `json:",omitzero"`
	ForLimit    bool `json:",omitzero"`
	ForSuspects bool `json:",omitzero"`
	// Pending is for how many parents it waits; the largest number: it will be canceled.
	Pending uint64 `json:",omitzero"`
	// Of a task that has ended: when, until when it is kept (0: for ever), and its result.
	EndedAt uint64         `json:",omitzero"`
	Until   uint64         `json:",omitzero"`
	Result  []byte         `json:",omitempty"`
	Pinned  *pinnedLine    `json:",omitempty"`
	Lease   *leaseLine     `json:",omitempty"`
	HasKey  bool           `json:",omitzero"`  // it has its idempotency key, until
	KeyTill uint64         `json:",omitzero"`  // that time at least; 0: until it has ended
	HasTurn bool           `json:",omitzero"`  // of its group
	Steps   []record.Step  `json:",omitempty"` // the finished ones
	Cursors record.Cursors `json:",omitempty"`
	Signals record.Signals `json:",omitempty"` // that it has got
	Awaits  bool           `json:",omitzero"`  // it is suspended until the signal of its last step
}

// pinnedLine says for how many children a result is kept, and until when it is kept after them.
type pinnedLine struct{ Count, Until uint64 }

// leaseLine is a lease in force.
type leaseLine struct {
	Token    uint64
	Deadline uint64
	Duration uint64
	Leases   uint32
	Attempts uint32
	Worker   string `json:",omitzero"`
	Local    bool   `json:",omitzero"` // it ends when the queue is opened
}
