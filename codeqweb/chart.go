package codeqweb

import (
	"fmt"
	"strings"
	"time"
)

// The size of a chart, in units of its viewBox.
const (
	chartWidth  = 600
	chartHeight = 120
)

// chart is a drawing of series over time, for the template "chart".
type chart struct {
	ID, Title string
	Max       string // the value at the top
	Now       string // the latest values, for screen readers
	From, To  time.Time
	Lines     []chartLine
}

// chartLine is one series: Class is its color, D its path.
type chartLine struct{ Class, Name, D string }

// value is a series: its name, and its value at a point.
type value struct {
	class, name string
	of          func(p *point) float64
}

// drawChart draws points, if there are two or more. Its time axis ends now.
func drawChart(id, title string, points []point, length time.Duration, now time.Time, show func(float64) string, values ...value) chart {
	c := chart{ID: id, Title: title, From: now.Add(-length), To: now}
	top := 0.0
	for i := range points {
		for _, v := range values {
			top = max(top, v.of(&points[i]))
		}
	}
	c.Max = show(top)
	var latest []string
	for _, v := range values {
		line := chartLine{Class: v.class, Name: v.name}
		var d strings.Builder
		began := false
		for i := range points {
			x := chartWidth * (1 - now.Sub(time.Unix(int64(points[i].at), 0)).Seconds()/length.Seconds())
			if x < 0 {
				continue
			}
			y := float64(chartHeight)
			if top > 0 {
				y -= (chartHeight - 4) * v.of(&points[i]) / top
			}
			letter := byte('L')
			if !began {
				letter, began = 'M', true
			}
			fmt.Fprintf(&d, "%c%.1f %.1f", letter, min(x, chartWidth), y)
		}
		if line.D = d.String(); len(points) > 0 {
			latest = append(latest, v.name+" "+show(v.of(&points[len(points)-1])))
		}
		c.Lines = append(c.Lines, line)
	}
	c.Now = strings.Join(latest, ", ")
	return c
}

// perSecond divides the counts of a point by the seconds since the previous point.
func perSecond(points []point, of func(p *point) uint32) func(p *point) float64 {
	took := make(map[uint32]float64, len(points))
	for i := 1; i < len(points); i++ {
		took[points[i].at] = max(1, float64(points[i].at-points[i-1].at))
	}
	return func(p *point) float64 {
		if seconds := took[p.at]; seconds > 0 {
			return float64(of(p)) / seconds
		}
		return 0
	}
}

// charts returns the charts of a queue, or of all queues for "".
func (d *Dashboard) charts(queue string, byMinute bool) []chart {
	length := secondsKept * time.Second
	if byMinute {
		length = minutesKept * time.Minute
	}
	points, now := d.sampler.points(queue, byMinute), time.Now()
	count := func(f float64) string { return number(int64(f)) }
	return []chart{
		drawChart("throughput", "Tasks a second", points, length, now, rate,
			value{"a", "produced", perSecond(points, func(p *point) uint32 { return p.produced })},
			value{"b", "completed", perSecond(points, func(p *point) uint32 { return p.completed })},
			value{"c", "failed", perSecond(points, func(p *point) uint32 { return p.failed })}),
		drawChart("waiting", "Tasks", points, length, now, count,
			value{"a", "ready", func(p *point) float64 { return float64(p.ready) }},
			value{"b", "leased", func(p *point) float64 { return float64(p.leased) }},
			value{"c", "dead", func(p *point) float64 { return float64(p.dead) }}),
		drawChart("age", "Age of the oldest ready task", points, length, now,
			func(f float64) string { return span(time.Duration(f) * time.Second) },
			value{"a", "waits", func(p *point) float64 { return float64(p.oldest) }}),
	}
}

// bar is a day of a chart of days.
type bar struct {
	X, Y, Width, Height float64
	Class, Title        string
}

// drawDays draws the completed and failed attempts of each day, the last day at the right.
func drawDays(days []dayTotals, kept int, today time.Time) (bars []bar, top uint64) {
	for _, d := range days {
		top = max(top, d.Completed+d.Failed)
	}
	const width = float64(chartWidth)
	slot := width / float64(kept)
	for _, d := range days {
		n := kept - 1 - int(today.Sub(d.Day).Hours()/24)
		if n < 0 || n >= kept || top == 0 {
			continue
		}
		title := fmt.Sprintf("%s: %s completed, %s failed", d.Day.Format("2006-01-02"), number(d.Completed), number(d.Failed))
		done := chartHeight * float64(d.Completed) / float64(top)
		failed := chartHeight * float64(d.Failed) / float64(top)
		x := float64(n) * slot
		bars = append(bars,
			bar{x, chartHeight - done, slot * 0.8, done, "b", title},
			bar{x, chartHeight - done - failed, slot * 0.8, failed, "c", title})
	}
	return bars, top
}

// dayTotals is a day of drawDays.
type dayTotals struct {
	Day               time.Time
	Completed, Failed uint64
}
