"""Scores of responses: functions of one sample's text and ground truth."""
