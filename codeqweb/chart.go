package codeqweb

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"time"

	"codeq"
)

// chartFiles are the files of a page with charts.
var chartFiles = []string{"lib/uplot.css", "lib/uplot.js", "charts.js"}

// chartSpan is the time that charts show.
type chartSpan struct {
	Name, Title string
	length      time.Duration
	in          resolution
	before      bool // the day before is shown behind
}

// spans lists them; the first one is the default. The last one has the totals of days.
var spans = []chartSpan{
	{"5m", "5 minutes", 5 * time.Minute, bySecond, false},
	{"1h", "1 hour", time.Hour, byMinute, true},
	{"24h", "24 hours", 24 * time.Hour, byMinute, true},
	{"7d", "7 days", 7 * 24 * time.Hour, byTenMinutes, false},
	daySpan,
}

var daySpan = chartSpan{"90d", "90 days", codeq.TotalsDays * 24 * time.Hour, 0, false}

// spanOf returns the span in the parameters of a page.
func spanOf(p url.Values) chartSpan {
	for _, s := range spans {
		if s.Name == p.Get("span") {
			return s
		}
	}
	return spans[0]
}

// chartData is what charts draw, one value for each of the times.
type chartData struct {
	Span, Title string
	From, To    int64   // the axis, seconds since 1970
	Times       []int64 // ascending
	Charts      []*chart
}

// chart has series with one axis.
type chart struct {
	ID, Title string
	Unit      string // "rate": a second, "count", "seconds", "day": a day
	Series    []*chartSeries
}

// chartSeries is a line: Class is its color, "before" that of the day before.
type chartSeries struct {
	Name, Class string
	Values      values
}

// values are the values of a series; NaN: nothing was measured.
type values []float64

// MarshalJSON writes three digits of each value, and null for NaN.
func (v values) MarshalJSON() ([]byte, error) {
	b := make([]byte, 0, 2+5*len(v))
	b = append(b, '[')
	for i, f := range v {
		if i > 0 {
			b = append(b, ',')
		}
		switch {
		case math.IsNaN(f):
			b = append(b, "null"...)
		case f == math.Trunc(f):
			b = strconv.AppendFloat(b, f, 'f', 0, 64)
		default:
			b = strconv.AppendFloat(b, f, 'g', 3, 64)
		}
	}
	return append(b, ']'), nil
}

// last returns the newest value; NaN: there is none.
func (v values) last() float64 {
	for i := len(v) - 1; i >= 0; i-- {
		if !math.IsNaN(v[i]) {
			return v[i]
		}
	}
	return math.NaN()
}

// Show formats a value of a chart.
func (c *chart) Show(f float64) string {
	switch {
	case math.IsNaN(f):
		return "–"
	case c.Unit == "rate":
		return rate(f) + "/s"
	case c.Unit == "seconds":
		return span(time.Duration(f) * time.Second)
	default:
		return number(int64(f))
	}
}

// Now says the newest values.
func (c *chart) Now() (text string) {
	for _, s := range c.Series {
		text += fmt.Sprintf("%s %s, ", s.Name, c.Show(s.Values.last()))
	}
	return text[:max(0, len(text)-2)]
}

// Last is the newest value of a series.
func (s *chartSeries) Last() float64 { return s.Values.last() }

// measure is a value of points. counted: it counts what happened since the point before.
type measure struct {
	name, class string
	counted     bool
	of          func(*point) uint32
}

// measures lists the charts of a queue. The first of each is also shown for the day before.
var measures = []struct {
	id, title, unit string
	of              []measure
}{
	{"throughput", "Tasks a second", "rate", []measure{
		{"completed", "b", true, func(p *point) uint32 { return p.completed }},
		{"produced", "a", true, func(p *point) uint32 { return p.produced }},
		{"failed", "c", true, func(p *point) uint32 { return p.failed }},
	}},
	{"waiting", "Tasks", "count", []measure{
		{"ready", "a", false, func(p *point) uint32 { return p.ready }},
		{"leased", "b", false, func(p *point) uint32 { return p.leased }},
		{"dead", "c", false, func(p *point) uint32 { return p.dead }},
	}},
	{"age", "Wait of the oldest ready task", "seconds", []measure{
		{"waits", "a", false, func(p *point) uint32 { return p.oldest }},
	}},
}

// charts returns the charts of a queue, or of all queues for "".
func (d *Dashboard) charts(ctx context.Context, queue string, s chartSpan) (*chartData, error) {
	now := time.Now()
	if s.Name == daySpan.Name {
		days, err := d.daysOf(ctx, queue)
		return dayCharts(days, now), err
	}
	return pointCharts(d.sampler.points(queue, s.in), s, now), nil
}

// pointCharts draws points in a span that ends now.
func pointCharts(points []point, s chartSpan, now time.Time) *chartData {
	to := now.Unix()
	c := &chartData{Span: s.Name, Title: s.Title, From: to - int64(s.length.Seconds()), To: to}
	begin := sort.Search(len(points), func(i int) bool { return int64(points[i].at) >= c.From })
	shown := spaced(points, begin, s.in)
	for i := range shown {
		c.Times = append(c.Times, int64(shown[i].at))
	}
	for _, m := range measures {
		of := &chart{ID: m.id, Title: m.title, Unit: m.unit}
		if s.before {
			of.Series = append(of.Series, &chartSeries{m.of[0].name + " the day before", "before", dayBefore(points, shown, &m.of[0])})
		}
		for i := range m.of {
			series := &chartSeries{m.of[i].name, m.of[i].class, make(values, len(shown))}
			for k := range shown {
				series.Values[k] = m.of[i].value(&shown[k])
			}
			of.Series = append(of.Series, series)
		}
		c.Charts = append(c.Charts, of)
	}
	return c
}

// spacedPoint is a point with the time that its counts are of. took 0: nothing was measured then.
type spacedPoint struct {
	point
	took float64 // seconds; negative: not known
}

// gapAfter is how long nothing is measured, at least, in a gap: the sampler samples each minute.
const gapAfter = 150

// spaced returns the points from begin on, with a point of a gap after each one that is followed by
// nothing for long.
func spaced(points []point, begin int, in resolution) (shown []spacedPoint) {
	long := max(gapAfter, 5*uint32(resolutions[in].every.Seconds())/2)
	for i := begin; i < len(points); i++ {
		p := spacedPoint{points[i], -1}
		if i > 0 {
			switch since := p.at - points[i-1].at; {
			case since <= long:
				p.took = max(1, float64(since))
			case i > begin:
				shown = append(shown, spacedPoint{point{at: points[i-1].at + 1}, 0})
			}
		}
		shown = append(shown, p)
	}
	return shown
}

func (m *measure) value(p *spacedPoint) float64 {
	switch {
	case p.took == 0 || m.counted && p.took < 0:
		return math.NaN()
	case m.counted:
		return float64(m.of(&p.point)) / p.took
	default:
		return float64(m.of(&p.point))
	}
}

// dayBefore returns the values of 24 hours before each point.
func dayBefore(points []point, shown []spacedPoint, m *measure) values {
	v, k := make(values, len(shown)), 0
	old := spaced(points, 0, byMinute)
	for i := range shown {
		at := shown[i].at - 24*60*60
		for k+1 < len(old) && old[k+1].at <= at {
			k++
		}
		if v[i] = math.NaN(); shown[i].took != 0 && k < len(old) && old[k].at <= at && at-old[k].at < gapAfter {
			v[i] = m.value(&old[k])
		}
	}
	return v
}

// dayCharts draws the totals of days, with a value for each of them.
func dayCharts(days []codeq.DayTotals, now time.Time) *chartData {
	today := now.UTC().Truncate(24 * time.Hour)
	c := &chartData{Span: daySpan.Name, Title: daySpan.Title, From: today.AddDate(0, 0, 1-codeq.TotalsDays).Unix(), To: today.Unix()}
	of := &chart{ID: "throughput", Title: "Tasks a day, in UTC", Unit: "day", Series: []*chartSeries{{"completed", "b", nil}, {"produced", "a", nil}, {"failed", "c", nil}}}
	c.Charts = []*chart{of}
	for day := time.Unix(c.From, 0).UTC(); !day.After(today); day = day.AddDate(0, 0, 1) {
		for len(days) > 0 && days[0].Day.Before(day) {
			days = days[1:]
		}
		if c.Times == nil && (len(days) == 0 || !days[0].Day.Equal(day)) {
			continue // before the first day
		}
		var t totals
		if len(days) > 0 && days[0].Day.Equal(day) {
			t = totalsOf(&days[0].Totals)
		}
		c.Times = append(c.Times, day.Unix())
		for i, n := range []uint64{t.completed, t.produced, t.failed} {
			of.Series[i].Values = append(of.Series[i].Values, float64(n))
		}
	}
	return c
}

// daysQueues is how many queues may have their days summed, which are read from each.
const daysQueues = 1000

var errManyDays = &refusal{http.StatusConflict, "invalid", "the days of more than " + number(daysQueues) + " queues are not summed: open a queue"}

// daysOf returns the totals of a queue, or of all queues for "", for each day that has any.
func (d *Dashboard) daysOf(ctx context.Context, queue string) ([]codeq.DayTotals, error) {
	if queue != "" {
		return d.q.TotalsByDay(ctx, queue)
	}
	if s := d.sampler.current(); s.Queues > daysQueues || len(s.Rows) < s.Queues {
		return nil, errManyDays
	}
	return d.days.get(ctx)
}

// readDays sums the totals of all queues by day.
func (d *Dashboard) readDays(ctx context.Context) ([]codeq.DayTotals, error) {
	sums := make(map[time.Time]codeq.DayTotals)
	for _, r := range d.sampler.current().Rows {
		days, err := d.q.TotalsByDay(ctx, r.Name)
		if err != nil {
			return nil, err
		}
		for i := range days {
			sum := sums[days[i].Day]
			sum.Day = days[i].Day
			addTotals(&sum.Totals, &days[i].Totals)
			sums[sum.Day] = sum
		}
	}
	return slices.SortedFunc(maps.Values(sums), func(a, b codeq.DayTotals) int { return a.Day.Compare(b.Day) }), nil
}

// chartRows is the number of rows in the table of the values.
const chartRows = 12

// chartRow is a row of the table: a time, and the values of all series, as texts.
type chartRow struct {
	At     time.Time
	Values []string
}

// Rows returns a table of values at about even distances, the newest first.
func (c *chartData) Rows() (rows []chartRow) {
	n := len(c.Times)
	for i := range min(n, chartRows) {
		k := n - 1 - i*n/min(n, chartRows)
		r := chartRow{At: time.Unix(c.Times[k], 0).UTC()}
		for _, of := range c.Charts {
			for _, s := range of.Series {
				r.Values = append(r.Values, of.Show(s.Values[k]))
			}
		}
		rows = append(rows, r)
	}
	return rows
}

// chartsView is the place of charts on a page, for the template "charts".
type chartsView struct {
	*chartData
	Queue string
	Spans []spanLink
	URL   string // of the data
	Error error  // why there are none
}

type spanLink struct {
	Title, URL string
	On         bool
}

// chartsView returns the charts of a page. at is the link to the page without the span.
func (d *Dashboard) chartsView(ctx context.Context, queue string, s chartSpan, screen string, params url.Values) (*chartsView, error) {
	data, err := d.charts(ctx, queue, s)
	if err != nil && !errors.Is(err, errManyDays) {
		return nil, err
	}
	v := &chartsView{chartData: data, Error: err, Queue: queue, URL: link("api/v1/charts", "queue", queue, "span", s.Name)}
	for _, other := range spans {
		p := maps.Clone(params)
		p.Set("span", other.Name)
		v.Spans = append(v.Spans, spanLink{other.Title, screen + "?" + p.Encode(), other == s})
	}
	return v, nil
}

// apiCharts is the data of the charts of a page.
func (d *Dashboard) apiCharts(ctx context.Context, r *request) (any, error) {
	span := spanOf(r.params)
	if text := r.params.Get("span"); text != "" && text != span.Name {
		return nil, invalid("span", "5m, 1h, 24h, 7d or 90d")
	}
	_, _ = d.sampler.fresh(ctx, time.Second) // after an error, charts have a gap
	return d.charts(ctx, r.params.Get("queue"), span)
}

// spark is a small line without axes: the ready tasks of the last hour.
type spark struct {
	D, Text string // its path in a box of 100 by 20, and its words
}

// sparkOf draws points, if there are two or more.
func sparkOf(points []point) *spark {
	if len(points) < 2 {
		return nil
	}
	top, least := uint32(1), uint32(math.MaxUint32)
	for i := range points {
		top, least = max(top, points[i].ready), min(least, points[i].ready)
	}
	b := make([]byte, 0, 8*len(points))
	from, length := points[0].at, max(1, points[len(points)-1].at-points[0].at)
	for i := range points {
		b = fmt.Appendf(b, "%c%d %d", "ML"[min(i, 1)], 100*(points[i].at-from)/length, 19-18*uint64(points[i].ready)/uint64(top))
	}
	return &spark{string(b), fmt.Sprintf("%s to %s ready in the last hour", number(least), number(top))}
}
