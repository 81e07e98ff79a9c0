package offline

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"reflect"
	"strconv"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/record"
)

// oddText is in every string of a filled value.
const oddText = "text \u202e \ufffd \\ufffd é"

// fill sets everything within v: no value stays zero. Slices get ten elements.
func fill(t *testing.T, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			require.True(t, v.Type().Field(i).IsExported(), "%v", v.Type())
			fill(t, v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(t, v.Index(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 10, 10))
		for i := range v.Len() {
			fill(t, v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf(oddText), reflect.ValueOf(oddText).Convert(v.Type().Elem()))
	case reflect.String:
		v.SetString(oddText)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(2)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(2)
	case reflect.Float64:
		v.SetFloat(2)
	default:
		require.Fail(t, "a field of a kind that is not filled", "%v", v.Type())
	}
}

// filled returns a value without a zero field.
func filled[T any](t *testing.T) (v T) {
	fill(t, reflect.ValueOf(&v).Elem())
	return v
}

// carried writes a line, and returns the line that a reader gets.
func carried(t *testing.T, l *Line) *Line {
	t.Helper()
	var b bytes.Buffer
	w := newWriter(&b)
	require.NoError(t, w.write(l))
	require.NoError(t, w.out.Flush())
	require.Equal(t, 1, bytes.Count(b.Bytes(), []byte("\n")))
	read := new(Line)
	require.NoError(t, parse(b.Bytes(), read))
	return read
}

// fullRecord returns a record without a zero field, of a task of a queue and tenant.
func fullRecord(t *testing.T, queue, tenant string) record.Record {
	rec := filled[record.Record](t)
	rec.Leases, rec.Group, rec.Limit = 20, keys.GroupScope(queue, tenant, rec.LimitKey, rec.GroupKey), keys.LimitScope(queue, rec.LimitKey)
	require.Len(t, rec.Kept, 10, "Steps of a taskLine has them")
	require.Len(t, rec.Cursors, 1, "Cursors of a taskLine has them")
	rec.Steps, rec.Beside, rec.Kept, rec.Cursors = 0, 0, nil, nil
	rec.DeadKind = 0 // an import counts dead letters again
	require.NoError(t, rec.Sound())
	return rec
}

// TestEveryField fills each field of all stored forms, and finds it again after a line was written
// and read. A new field of a stored form that is not in the lines is missing here.
func TestEveryField(t *testing.T) {
	const queue, tenant = "queue \\ufffd", "tenant \ufffd"
	rec := fullRecord(t, queue, tenant)
	id := keys.ID{0: 1, 6: 0x70, 8: 0x80, 15: 9}
	for _, p := range []keys.Place{
		{Range: keys.Task, Group: 3, At: keys.SinceOf(id)}, {Range: keys.Task, Group: 3, At: keys.MovedSince(77)},
		{Range: keys.Scheduled, At: 77}, {Range: keys.Blocked, Group: 2}, {Range: keys.Blocked, Group: 2, At: rec.Group},
		{Range: keys.Blocked, Group: 2, At: rec.Limit}, {Range: keys.Blocked, Group: 2, At: keys.SuspectScope(queue, keys.SuspectPartOf(id, rec.Leases))}, {Range: keys.Dead, Group: 2, At: 77}, {Range: keys.Done, Group: 2, At: keys.Forever},
		{Range: keys.Canceled, Group: 2, At: 77},
	} {
		ended := filled[keys.EndedValue](t)
		if !keys.Ended(p.Range) {
			ended = keys.EndedValue{}
		}
		task := &taskLine{Template: Template{Queue: queue, Tenant: tenant, Priority: 4, Record: recordOf(&rec)}}
		task.placed(id, p, &rec, &ended)
		got := carried(t, &Line{Task: task}).Task
		require.Equal(t, task, got)
		require.Equal(t, lineID(id), got.ID)
		gotRec, err := got.record()
		require.NoError(t, err)
		require.Equal(t, rec, gotRec)
		gotPlace, err := got.place(id, 2, 3, &rec)
		require.NoError(t, err)
		require.Equal(t, p, gotPlace)
		if keys.Ended(p.Range) {
			gotEnded, gotRec, err := keys.ParseEnded(got.value(p, ended.Lane, &rec))
			require.NoError(t, err)
			require.Equal(t, ended, gotEnded)
			require.Equal(t, rec.Encode(), gotRec)
		}
	}

	h, e := filled[keys.LeaseHeader](t), filled[keys.LeaseEntry](t)
	h.Ends, h.Process = 0, 0 // of a cluster only
	task := filled[taskLine](t)
	task.State = keys.Task
	task.Lease = leaseOf(&h, &e)
	lease := carried(t, &Line{Task: &task}).Task.Lease
	require.Equal(t, e, lease.entry(e.ID, keys.Place{Range: keys.Task, Group: e.Lane, At: e.Since}))
	require.Equal(t, h, keys.LeaseHeader{Local: lease.Local, Deadline: lease.Deadline})

	v := filled[keys.ScheduleValue](t)
	own := fullRecord(t, v.Queue, v.Tenant)
	v.Record = own.Encode()
	s, err := scheduleOf(oddText, &v)
	require.NoError(t, err)
	s = carried(t, &Line{Schedule: s}).Schedule
	require.Equal(t, oddText, s.Name)
	back, err := s.record()
	require.NoError(t, err)
	require.Equal(t, v.Append(nil), s.value(&back))
	gotValue, err := keys.ParseScheduleValue(s.value(&back))
	require.NoError(t, err)
	require.Equal(t, v, gotValue)

	m := filled[keys.Message](t)
	m.Kind, m.Queue, m.Tenant = keys.MsgFollow, queue, tenant
	m.Record = rec.Encode()
	m.Siblings = m.Siblings[:1]
	m.Tasks = []keys.MessageTask{{Queue: queue, Tenant: tenant, Priority: m.Priority, Record: rec.Encode()}}
	l, err := messageOf(&m)
	require.NoError(t, err)
	l = carried(t, &Line{Message: l}).Message
	gotRec, err := l.Task.record()
	require.NoError(t, err)
	require.Equal(t, m, keys.Message{
		Kind: l.Kind, Queue: l.Task.Queue, Tenant: l.Task.Tenant, Priority: l.Task.Priority, Record: gotRec.Encode(),
		Parent: keys.ID(l.Parent), Child: keys.ID(l.Child), Outcome: l.Outcome, Until: l.Until, Settings: m.Settings,
		Schedule: l.Schedule, Tick: l.Tick, Siblings: []keys.ID{keys.ID(l.Siblings[0])},
		Tasks: []keys.MessageTask{{Queue: l.Tasks[0].Queue, Tenant: l.Tasks[0].Tenant, Priority: l.Tasks[0].Priority, Record: gotRec.Encode()}},
	})
	for _, f := range reflect.VisibleFields(reflect.TypeFor[manifest.Manifest]()) {
		require.Contains(t, []string{
			"Options", "Crashed", // in lines; the others concern the directory, or a node
			"Format", "Shards", "ID", "Creating", "Open", "Opening", "Node", "Cluster", "Former", "Volatile", "Differ",
			"Founders", "Drained", "Left", "Incarnation", "Earlier", "Seen", "Outdated", "Sum",
		}, f.Name)
	}
	require.Equal(t, 2, reflect.TypeFor[keys.SettingsValue]().NumField(), "Settings has them")
	require.Equal(t, 2, reflect.TypeFor[keys.PinnedValue]().NumField(), "Pinned has them")
	require.Equal(t, 2, reflect.TypeFor[keys.PeriodTimeValue]().NumField(), "Header has the clock, the other saves a search")
	require.Equal(t, 2, reflect.TypeFor[keys.UniqueValue]().NumField(), "HasKey and KeyTill have them")
	require.Equal(t, 2, reflect.TypeFor[keys.GroupValue]().NumField(), "HasTurn has one, the other is derived")
	require.Equal(t, 3, reflect.TypeFor[keys.TotalsValue]().NumField(), "Totals has them")
	require.Equal(t, 3, reflect.TypeFor[keys.CountersValue]().NumField(), "Header and Totals have two, the counts are derived")
}

// TestEveryLine: a reader gets each kind of line as it was written, with any strings.
func TestEveryLine(t *testing.T) {
	types := reflect.TypeFor[Line]()
	for i := range types.NumField() {
		l := new(Line)
		fill(t, reflect.ValueOf(l).Elem().Field(i))
		if l.Task != nil {
			l.Task.State = keys.Done
		}
		if l.Telling != nil {
			l.Telling.End = keys.Dead
		}
		if l.Settings != nil {
			l.Settings.Value = json.RawMessage(`{"Paused":true}`)
		}
		require.Equal(t, l, carried(t, l), types.Field(i).Name)
	}
}

// TestEveryRange: each range of keys has its use in an export.
func TestEveryRange(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../keys/keys.go", nil, 0)
	require.NoError(t, err)
	found := 0
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST || len(g.Specs) < 30 {
			continue
		}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			n, err := strconv.ParseUint(v.Values[0].(*ast.BasicLit).Value, 0, 8)
			require.NoError(t, err)
			require.NotZero(t, ranges[byte(n)], v.Names[0].Name)
			found++
		}
	}
	if ranges[byte(found+1)] != 0 { // the next format adds one
		found++
	}
	require.Len(t, ranges, found)
}

// FuzzStrings: a reader gets a line of an export as it was written, with any strings in UTF-8.
// Others are refused.
func FuzzStrings(f *testing.F) {
	f.Add("name", "header", "value")
	f.Add("\xff\x00", "ÿ", "\u202e \\ufffd \ufffd")
	f.Fuzz(func(t *testing.T, queue, header, value string) {
		made := func() *Line {
			task := &taskLine{State: keys.Task, Template: Template{Queue: queue}}
			task.LastError, task.Headers = value, map[string]string{header: value}
			return &Line{Task: task}
		}
		if !utf8.ValidString(queue + "\x00" + header + "\x00" + value) {
			require.ErrorContains(t, newWriter(io.Discard).write(made()), "task "+made().Task.ID.String()+": a name, key or header is not UTF-8")
			return
		}
		require.Equal(t, made(), carried(t, made()))
	})
}
