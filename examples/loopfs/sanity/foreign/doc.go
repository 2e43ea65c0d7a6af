// Package foreign pins drivers of others, which make foreign builds.
package foreign
